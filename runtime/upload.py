"""Weights to the device: a file's by another thread while graphs are restored, others piece by piece.

A file goes by the faster of two ways. Where the driver can lock a file's own pages, its data is copied from them. Elsewhere
several threads take chunks through pinned banks. Either way the chunks are checked meanwhile, and nothing is accepted before
every digest was right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Event

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime.device_memory import NON_BLOCKING, DeviceMemory, make_event, pinned
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.locked_pages import LockedPages, pieces
from ouro_build.runtime.memory import check_range
from ouro_build.runtime.opening import READ_ONLY
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.threads import Workers, spare_cores
from ouro_build.runtime.weights_file import Chunk, WeightsFile

STAGING_THREADS = 8
"""Threads that fill pinned banks, at most: each has two banks of a chunk."""
_COPYING = "copying the weights to the device"
_PAUSE = 0.005
"""Seconds between pieces of pages that are unlocked, in which steps have the driver to themselves."""


class FileUpload:
    """`file` on its way to a device: `lock` once there is a driver, `copy` once there are pools, `finish` before ready.

    Then `release`, when there is time for it.

    The calls return at once but for `finish` and `close`; what they start runs on one thread, timed beside the phase
    `parent`. `close` takes the file with it, and is called in any case.
    """

    def __init__(self, file: WeightsFile, clock: StartupClock, parent: str) -> None:
        self._file, self._clock, self._parent = file, clock, parent
        self._thread = ThreadPoolExecutor(1, "weights")
        self._copied: Future[None] | None = None
        self._closing = Event()
        self._releasing = False

    def lock(self, driver: Driver) -> None:
        """Lock the file's pages for the device, if `driver` can and nobody has."""
        self._thread.submit(self._lock, driver)

    def copy(self, memory: DeviceMemory) -> None:
        """Fill the weights pool. Raises DeviceError if it is too small."""
        check_range(memory, Pool.WEIGHTS, 0, self._file.bytes)
        self._copied = self._thread.submit(self._copy, memory)

    def finish(self) -> int:
        """Wait until all is on the device and right; returns its bytes.

        Raises ArtifactError naming the file, and the chunk that is wrong; DeviceError if a copy failed.
        """
        self._file.wait()
        if self._copied is not None:
            self._copied.result()
        return self._file.bytes

    def release(self) -> None:
        """Begin to give back what only the copy needed: unlocking gigabytes of pages takes a while, and holds the driver."""
        if not self._releasing:
            self._releasing = True
            self._thread.submit(self._release)

    def close(self) -> None:
        """Wait for the copy, whether it failed or not, and give everything back."""
        self._closing.set()
        self.release()
        self._thread.shutdown()

    def _lock(self, driver: Driver) -> None:
        if self._file.locked is not None:
            return
        with self._clock.beside("lock pages", self._parent) as phase:
            driver.make_current()
            phase.bytes = self._file.bytes if _able(driver) and self._file.lock(_pages(driver)) else 0

    def _copy(self, memory: DeviceMemory) -> None:
        driver = memory.driver
        driver.make_current()
        with self._clock.beside("copy weights", self._parent) as phase, ExitStack() as resources:
            stream = driver.call("cuStreamCreate", NON_BLOCKING, doing="creating the stream of the weights")
            resources.callback(driver.release, "cuStreamDestroy", stream)
            # What it reads must stay while it is read; and what failed first is what is to be told.
            resources.callback(driver.release, "cuStreamSynchronize", stream)
            if self._file.locked is not None and self._file.mapped is not None:
                _copy_pieces(memory, self._file, self._file.mapped, stream)
            else:
                _stage(memory, self._file, stream)
            driver.call("cuStreamSynchronize", stream, doing=_COPYING)
            phase.bytes = self._file.bytes

    def _release(self) -> None:
        with self._clock.beside("release pages", self._parent):
            if self._file.locked is not None:
                self._file.locked.unlock(lambda: self._closing.wait(_PAUSE))
            self._file.close()


def upload_pieces(memory: DeviceMemory, pieces: Iterable[tuple[int, NDArray[np.generic]]]) -> int:
    """Put (offset in the weights pool, data) pairs there as they come; returns their bytes, all on the device."""
    total = 0
    for offset, data in pieces:
        memory.write(Pool.WEIGHTS, offset, data)
        total += data.nbytes
    memory.synchronize()
    return total


def _able(driver: Driver) -> bool:
    attribute = driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    return bool(driver.call("cuDeviceGetAttribute", attribute, driver.device, doing="asking about locked file pages"))


def _pages(driver: Driver) -> LockedPages:
    def lock(address: int, size: int) -> bool:
        try:
            driver.call("cuMemHostRegister", address, size, READ_ONLY, doing="locking a file's pages")
        except DeviceError:  # a file system or a limit that it cannot pass
            return False
        return True

    return LockedPages(lock, lambda address: driver.release("cuMemHostUnregister", address))


def _copy_pieces(memory: DeviceMemory, file: WeightsFile, mapped: NDArray[np.uint8], stream: object) -> None:
    """Copy the data of a file whose pages are locked straight from them."""
    for offset, size in pieces(len(mapped)):
        start = max(offset, file.data)
        if start < offset + size:
            target = memory.base(Pool.WEIGHTS) + start - file.data
            copy = (target, int(mapped.ctypes.data) + start, offset + size - start, stream)
            memory.driver.call("cuMemcpyHtoDAsync", *copy, doing=_COPYING)


class _Bank:
    """A pinned buffer of one reading thread, and the event after which it may be filled again."""

    def __init__(self, memory: DeviceMemory, size: int, stream: object, resources: ExitStack) -> None:
        driver = self._driver = memory.driver
        self._stream = stream
        self._bytes = pinned(driver, size, resources)
        self._event = make_event(driver, resources)
        self._pending = False

    def fill(self, file: WeightsFile, chunk: Chunk) -> NDArray[np.uint8]:
        """The chunk's bytes, read into the bank."""
        if self._pending:
            self._driver.call("cuEventSynchronize", self._event, doing="waiting for a staging bank")
            self._pending = False
        bytes_ = self._bytes[: chunk.end - chunk.start]
        file.read(chunk, bytes_)
        return bytes_

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy `data`, a part of the bank, to device memory at `address`."""
        copy = (address, int(data.ctypes.data), len(data), self._stream)
        self._driver.call("cuMemcpyHtoDAsync", *copy, doing=_COPYING)
        self._driver.call("cuEventRecord", self._event, self._stream, doing="marking a staging bank")
        self._pending = True


@contextmanager
def _taken(free: SimpleQueue[_Bank]) -> Iterator[_Bank]:
    """The bank that has been free for longest."""
    bank = free.get()
    try:
        yield bank
    finally:
        free.put(bank)


def _stage(memory: DeviceMemory, file: WeightsFile, stream: object) -> None:
    """Copy the file through pinned banks; chunks that no other thread checks are checked there."""
    threads, size = min(STAGING_THREADS, spare_cores()), max(c.end - c.start for c in file.chunks)
    with ExitStack() as resources:
        free: SimpleQueue[_Bank] = SimpleQueue()
        for _ in range(min(2 * threads, len(file.chunks))):  # one being filled, one on its way, for each thread
            free.put(_Bank(memory, size, stream, resources))
        resources.callback(memory.driver.release, "cuStreamSynchronize", stream)
        workers = Workers(partial(_stage_chunk, memory, file, free), len(file.chunks), threads, memory.driver.make_current)
        workers.wait()
        memory.driver.call("cuStreamSynchronize", stream, doing=_COPYING)


def _stage_chunk(memory: DeviceMemory, file: WeightsFile, free: SimpleQueue[_Bank], at: int) -> None:
    chunk = file.chunks[at]
    with _taken(free) as bank:
        data = bank.fill(file, chunk)
        if file.check and file.mapped is None:
            file.verify(chunk, data)
        skip = max(0, file.data - chunk.start)
        if skip < len(data):
            bank.send(memory.base(Pool.WEIGHTS) + chunk.start + skip - file.data, data[skip:])
