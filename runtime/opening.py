"""Starting CUDA beside other work: its calls release the interpreter, so that opening an artifact hides them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.startup import StartupClock


class OpeningDriver:
    """CUDA device number `device`, being opened on a thread of its own; timed as the phase `device` of the phase open now."""

    def __init__(self, device: int, clock: StartupClock) -> None:
        self._device = device
        self._clock = clock
        self._parent = clock.current
        threads = ThreadPoolExecutor(1, "cuda")
        self._driver = threads.submit(self._open)
        threads.shutdown(wait=False)  # the thread ends when the driver is open

    def result(self) -> Driver:
        """Wait for the driver and make its context current on the calling thread. Raises what `open_driver` raised."""
        driver = self._driver.result()
        driver.make_current()
        return driver

    def close(self) -> None:
        """Wait for the driver and give it back, if there is one."""
        if self._driver.exception() is None:
            self._driver.result().close()

    def _open(self) -> Driver:
        with self._clock.beside("device", self._parent):
            return open_driver(self._device)
