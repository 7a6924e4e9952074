"""Weights to the device, from a packed file or piece by piece, checked on the way.

A file goes by the faster of two ways. Where the driver can lock a file's own pages, it is mapped, its data copied in one
transfer, and the chunks hashed on several threads meanwhile. Elsewhere several threads read chunks into pinned banks,
hash them there, and copy them on. Either way nothing is accepted before every digest was right.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError, DeviceError
from ouro_build.artifacts.manifest import CHUNK, FileRecord
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime.device_memory import DeviceMemory, pinned
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.memory import check_range

THREADS = 8
"""Threads that read and hash, at most one a core."""
_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class _Piece(msgspec.Struct, frozen=True):
    """Bytes [start, end) of the file, covered by one digest."""

    index: int
    start: int
    end: int
    sha256: str


class _Source(msgspec.Struct, frozen=True):
    """A packed file: its data begins at byte `data` and fills the pool from its first byte."""

    path: Path
    descriptor: int
    bytes: int
    data: int
    pieces: tuple[_Piece, ...]


def upload_file(memory: DeviceMemory, path: Path, data: int, record: FileRecord, *, check: bool = True) -> int:
    """Fill the weights pool from the packed file `path`, whose data begins at byte `data`; returns the bytes copied.

    `record` is the file's entry in the manifest; `check` compares all of the file with its digests. Returns when the data
    is on the device. Raises ArtifactError naming the file, and the chunk that is wrong; DeviceError if a copy fails.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.bytes:
            raise ArtifactError(f"{size} bytes, the manifest says {record.bytes}", where=str(path))
        check_range(memory, Pool.WEIGHTS, 0, size - data)
        source = _Source(path, file.fileno(), size, data, _pieces(record))
        if not _upload_mapped(memory, source, check):
            _upload_staged(memory, source, check)
    return size - data


def upload_pieces(memory: DeviceMemory, pieces: Iterable[tuple[int, NDArray[np.generic]]]) -> int:
    """Put (offset in the weights pool, data) pairs there as they come; returns their bytes, all on the device."""
    total = 0
    for offset, data in pieces:
        memory.write(Pool.WEIGHTS, offset, data)
        total += data.nbytes
    memory.synchronize()
    return total


def _pieces(record: FileRecord) -> tuple[_Piece, ...]:
    if not record.chunks:
        return (_Piece(0, 0, record.bytes, record.sha256),)
    starts = range(0, record.bytes, CHUNK)
    if len(starts) != len(record.chunks):
        raise ArtifactError(f"{len(record.chunks)} chunk digests, {len(starts)} expected", where=record.path)
    return tuple(
        _Piece(i, start, min(start + CHUNK, record.bytes), digest)
        for i, (start, digest) in enumerate(zip(starts, record.chunks, strict=True))
    )


def _verify(source: _Source, piece: _Piece, data: NDArray[np.uint8]) -> None:
    if hashlib.sha256(data.data).hexdigest() != piece.sha256:
        raise ArtifactError(
            f"chunk {piece.index} (bytes {piece.start} … {piece.end}) is damaged: its sha256 is not {piece.sha256}",
            where=str(source.path),
            hint="Copy the file again from where the artifact was built.",
        )


def _threads() -> int:
    return min(THREADS, os.cpu_count() or 1)


def _each(work: Callable[[_Piece], None], pieces: Iterable[_Piece], start: Callable[[], None]) -> None:
    """Do `work` for every piece on several threads. The first failure is raised, after the threads have stopped."""
    with ThreadPoolExecutor(_threads(), initializer=start) as pool:
        futures = [pool.submit(work, piece) for piece in pieces]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _upload_mapped(memory: DeviceMemory, source: _Source, check: bool) -> bool:
    """Copy from the file's own pages; False if the driver will not lock them."""
    driver = memory.driver
    with ExitStack() as resources:
        mapped = _registered(driver, source, resources)
        if mapped is None:
            return False
        address = int(mapped.ctypes.data) + source.data
        copy = (memory.base(Pool.WEIGHTS), address, source.bytes - source.data, memory.stream)
        # The pages must stay locked while they are read, and what failed first is what is to be told.
        resources.callback(driver.release, "cuStreamSynchronize", memory.stream)
        driver.call("cuMemcpyHtoDAsync", *copy, doing="copying the weights to the device")
        if check:
            _each(lambda p: _verify(source, p, mapped[p.start : p.end]), source.pieces, lambda: None)
        memory.synchronize()
    return True


def _registered(driver: Driver, source: _Source, resources: ExitStack) -> NDArray[np.uint8] | None:
    """The file mapped and its pages locked, both undone when `resources` closes."""
    attribute = driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    if not driver.call("cuDeviceGetAttribute", attribute, driver.device, doing="asking about locked file pages"):
        return None
    try:
        pages = mmap.mmap(source.descriptor, 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
        mapped = np.frombuffer(pages, np.uint8)  # unmapped when the last view of it goes
        driver.call("cuMemHostRegister", mapped.ctypes.data, len(mapped), _READ_ONLY, doing="locking the file's pages")
    except (OSError, DeviceError):  # a file system or a driver that cannot
        return None
    resources.callback(driver.release, "cuMemHostUnregister", mapped.ctypes.data)
    return mapped


_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class _Bank:
    """A pinned buffer of one reading thread, and the event after which it may be filled again."""

    def __init__(self, memory: DeviceMemory, size: int, resources: ExitStack) -> None:
        driver = self._driver = memory.driver
        self._stream = memory.stream
        self._bytes = pinned(driver, size, resources)
        self._event = driver.call("cuEventCreate", _DISABLE_TIMING, doing="creating an event")
        resources.callback(driver.release, "cuEventDestroy", self._event)
        self._pending = False

    def fill(self, source: _Source, piece: _Piece) -> NDArray[np.uint8]:
        """The piece's bytes, read into the bank."""
        if self._pending:
            self._driver.call("cuEventSynchronize", self._event, doing="waiting for a staging bank")
            self._pending = False
        bytes_ = self._bytes[: piece.end - piece.start]
        done = 0
        while done < len(bytes_):
            read = os.preadv(source.descriptor, [bytes_[done:].data], piece.start + done)
            if not read:
                raise ArtifactError(f"ends at byte {piece.start + done}", where=str(source.path))
            done += read
        return bytes_

    def send(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy `data`, a part of the bank, to device memory at `address`."""
        copy = (address, int(data.ctypes.data), len(data), self._stream)
        self._driver.call("cuMemcpyHtoDAsync", *copy, doing="copying the weights to the device")
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


def _upload_staged(memory: DeviceMemory, source: _Source, check: bool) -> None:
    base, size = memory.base(Pool.WEIGHTS), max(p.end - p.start for p in source.pieces)
    with ExitStack() as resources:
        free: SimpleQueue[_Bank] = SimpleQueue()
        for _ in range(min(2 * _threads(), len(source.pieces))):  # one being filled, one on its way, for each thread
            free.put(_Bank(memory, size, resources))
        resources.callback(memory.driver.release, "cuStreamSynchronize", memory.stream)

        def work(piece: _Piece) -> None:
            with _taken(free) as bank:
                data = bank.fill(source, piece)
                if check:
                    _verify(source, piece, data)
                skip = max(0, source.data - piece.start)
                if skip < len(data):
                    bank.send(base + piece.start + skip - source.data, data[skip:])

        _each(work, source.pieces, memory.driver.make_current)
        memory.synchronize()
