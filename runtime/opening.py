"""Starting CUDA beside other work: its calls release the interpreter, so that imports and opening an artifact hide them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.startup import StartupClock


class OpeningDriver:
    """CUDA device number `device`, being opened on a thread of its own; timed as the phase `device` of the phase open now.

    With `early` the context is made before the bindings are imported, which other threads can do meanwhile.
    """

    def __init__(self, device: int, clock: StartupClock, *, early: bool = False) -> None:
        self.device = device
        self._early = early
        self._clock = clock
        self._parent = clock.current
        self._driver: Driver | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, name="cuda")
        self._thread.start()

    def result(self) -> Driver:
        """Wait for the driver and make its context current on the calling thread. Raises what `open_driver` raised."""
        self._thread.join()
        if self._driver is None:
            raise self._error or RuntimeError("the thread that opens CUDA ended early")
        self._driver.make_current()
        return self._driver

    def close(self) -> None:
        """Wait for the driver and give it back, if there is one."""
        self._thread.join()
        if self._driver is not None:
            self._driver.close()

    def _open(self) -> None:
        try:
            with self._clock.beside("device", self._parent):
                release = hold_context(self.device) if self._early else _nothing
                self._driver = open_driver(self.device)
                release()
        except BaseException as error:  # told where the driver is waited for
            self._error = error


def hold_context(device: int) -> Callable[[], None]:
    """Make the primary context of CUDA device `device` without the bindings; returns what gives this hold on it back.

    Does nothing where that fails: whoever opens the device next says why.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _nothing
    number, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(number), device):
        return _nothing
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
        return _nothing

    def release() -> None:
        cuda.cuDevicePrimaryCtxRelease_v2(number)

    return release


def _nothing() -> None:
    """What there is to give back where nothing was taken."""
