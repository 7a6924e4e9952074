"""The artifact's own weights: mapped, and checked chunk by chunk on several threads from the moment they are opened."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import CHUNK, FileRecord
from ouro_build.runtime.threads import Workers, spare_cores


class Chunk(msgspec.Struct, frozen=True):
    """Bytes [start, end) of the file, covered by one digest."""

    index: int
    start: int
    end: int
    sha256: str


class WeightsFile:
    """The packed file at `path`, whose data begins at byte `data` and fills the weights pool from its first byte.

    `record` is its entry in the manifest. With `check`, every byte is compared with its digests; `bytes` of data in all.
    `mapped` is the whole file, None where the file system maps none: then who reads chunks passes them to `verify`.
    Raises ArtifactError for a file of another size, or a record that is not of it. `done` is called when the threads end.
    """

    def __init__(
        self, path: Path, data: int, record: FileRecord, *, check: bool, done: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self.data, self.check = path, data, check
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(self._descriptor).st_size
            if size != record.bytes:
                raise ArtifactError(f"{size} bytes, the manifest says {record.bytes}", where=str(path))
            self.chunks = _chunks(record)
            self.bytes = size - data
            self.mapped = self._map()
        except BaseException:
            os.close(self._descriptor)
            raise
        count = 0 if self.mapped is None else len(self.chunks)
        self._workers = Workers(self._visit, count, spare_cores(), done=done)

    @property
    def by_mapping(self) -> bool:
        """Whether the threads here check the file: else whoever reads a chunk does."""
        return self.mapped is not None

    def read(self, chunk: Chunk, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the chunk's bytes. Raises ArtifactError if the file has become shorter."""
        if self.mapped is not None:
            np.copyto(out, self.mapped[chunk.start : chunk.end])
            return
        done = 0
        while done < len(out):
            read = os.preadv(self._descriptor, [out[done:].data], chunk.start + done)
            if not read:
                raise ArtifactError(f"ends at byte {chunk.start + done}", where=str(self.path))
            done += read

    def verify(self, chunk: Chunk, data: NDArray[np.uint8]) -> None:
        """Raise ArtifactError, naming file and chunk, unless `data` is what the manifest says of `chunk`."""
        if hashlib.sha256(data.data).hexdigest() != chunk.sha256:
            raise ArtifactError(
                f"chunk {chunk.index} (bytes {chunk.start} … {chunk.end}) is damaged: its sha256 is not {chunk.sha256}",
                where=str(self.path),
                hint="Copy the file again from where the artifact was built.",
            )

    def wait(self) -> None:
        """Wait until every chunk has been visited. Raises ArtifactError for the first that is damaged."""
        self._workers.wait()

    def close(self) -> None:
        """Stop the threads and let the file go. Nothing may use `mapped` any more."""
        self._workers.stop()
        self.mapped = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _map(self) -> NDArray[np.uint8] | None:
        try:
            pages = mmap.mmap(self._descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError:  # a file system that cannot
            return None
        return np.frombuffer(pages, np.uint8)  # unmapped when the last view of it goes

    def _visit(self, at: int) -> None:
        """Bring a chunk's pages in, and check them."""
        chunk, mapped = self.chunks[at], self.mapped
        if mapped is None:
            return
        # One request for the whole chunk: page faults alone would read a cold file in small pieces.
        with suppress(OSError):  # it is advice
            os.posix_fadvise(self._descriptor, chunk.start, chunk.end - chunk.start, os.POSIX_FADV_WILLNEED)
        view = mapped[chunk.start : chunk.end]
        if self.check:
            self.verify(chunk, view)
        else:
            view[:: mmap.PAGESIZE].max()  # locking pages that are mapped already is quicker


def _chunks(record: FileRecord) -> tuple[Chunk, ...]:
    if not record.chunks:
        return (Chunk(0, 0, record.bytes, record.sha256),)
    starts = range(0, record.bytes, CHUNK)
    if len(starts) != len(record.chunks):
        raise ArtifactError(f"{len(record.chunks)} chunk digests, {len(starts)} expected", where=record.path)
    return tuple(
        Chunk(i, start, min(start + CHUNK, record.bytes), digest)
        for i, (start, digest) in enumerate(zip(starts, record.chunks, strict=True))
    )
