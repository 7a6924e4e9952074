"""Starting CUDA beside other work: its calls release the interpreter, so that imports and opening an artifact hide them."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.startup import StartupClock

if TYPE_CHECKING:
    from ouro_build.runtime.chunk_hashes import ChunkHashes
    from ouro_build.runtime.locked_pages import LockedPages

READ_ONLY = 8
"""CU_MEMHOSTREGISTER_READ_ONLY: lock pages that the device only reads, such as a file's."""


class OpeningDriver:
    """CUDA device number `device`, being opened on a thread of its own; timed as the phase `device` of the phase open now.

    With `early` the context is made before the bindings are imported, which other threads can do meanwhile.
    """

    def __init__(self, device: int, clock: StartupClock, *, early: bool = False) -> None:
        self.device = device
        self.file: ChunkHashes | None = None
        """A file whose pages begin to be locked for the device as soon as there is a context, if that is made early."""
        self._early = early
        self._clock = clock
        self._parent = clock.current
        self._driver: Driver | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, name="cuda")
        self._thread.start()

    def result(self) -> Driver:
        """Wait for the driver and make its context current on the calling thread. Raises what `open_driver` raised."""
        self.wait()
        if self._driver is None:
            raise self._error or RuntimeError("the thread that opens CUDA ended early")
        self._driver.make_current()
        return self._driver

    def wait(self) -> None:
        """Wait until it is open, or has failed."""
        self._thread.join()

    def close(self) -> None:
        """Wait for the driver and give it back, if there is one; pages that were locked for it are unlocked before."""
        self.wait()
        if self.file is not None:
            self.file.unlock()
        if self._driver is not None:
            self._driver.close()

    def _open(self) -> None:
        held: HeldContext | None = None
        try:
            with self._clock.beside("device", self._parent):
                held = hold_context(self.device) if self._early else None
                if held is not None and self.file is not None:
                    self.file.lock_beside(partial(self._lock, held, self.file))
                self._driver = open_driver(self.device)
        except BaseException as error:  # told where the driver is waited for
            self._error = error
        if held is not None:
            if self._driver is None and self.file is not None:
                self.file.unlock()
            held.release()  # the driver holds it too, if there is one

    def _lock(self, held: HeldContext, file: ChunkHashes) -> LockedPages | None:
        """Lock the file's pages, if the device can; else whoever copies them finds out and takes another way."""
        from ouro_build.runtime.locked_pages import LockedPages  # CUDA has started by now

        with self._clock.beside("lock pages", self._parent) as phase:
            held.enter()
            address, locked = file.address, LockedPages(held.lock, held.unlock)
            if not address or not locked.lock(address, file.size):
                return None
            phase.bytes = file.size
            return locked


class HeldContext:
    """A primary context made without the bindings, current on the thread that made it and on those that enter it."""

    def __init__(self, cuda: Any, number: ctypes.c_int, context: ctypes.c_void_p) -> None:
        self._cuda, self._number, self._context = cuda, number, context

    def enter(self) -> None:
        """Make the context current on the calling thread."""
        self._cuda.cuCtxSetCurrent(self._context)

    def lock(self, address: int, size: int) -> bool:
        """Lock pages of the host that the device is to read; False if it cannot."""
        return not self._cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), READ_ONLY)

    def unlock(self, address: int) -> None:
        """Undo `lock`, on any thread: the context becomes current there."""
        self.enter()
        self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))

    def release(self) -> None:
        """Give this hold on the context back."""
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._number)


def hold_context(device: int) -> HeldContext | None:
    """Make the primary context of CUDA device `device` without the bindings.

    None where that fails: whoever opens the device next says why.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(number), device):
        return None
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
        return None
    held = HeldContext(cuda, number, context)
    if cuda.cuCtxSetCurrent(context):
        held.release()
        return None
    return held
