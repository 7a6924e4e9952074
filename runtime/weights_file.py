"""The artifact's own weights: mapped, and checked chunk by chunk while they go elsewhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import CHUNK, FileRecord
from ouro_build.runtime.chunk_hashes import ChunkHashes
from ouro_build.runtime.locked_pages import LockedPages


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
    `hashes` are those of this file, if they have begun already; else they begin now, and `done` is called when they end.
    Raises ArtifactError for a file of another size, or a record that is not of it. Takes `hashes` over.
    """

    def __init__(
        self,
        path: Path,
        data: int,
        record: FileRecord,
        *,
        check: bool,
        hashes: ChunkHashes | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.data, self.check = path, data, check
        size = CHUNK if record.chunks else record.bytes
        if hashes is not None and (hashes.chunk, hashes.check) != (size, check):
            hashes.close()
            hashes = None
        self._hashes = hashes or ChunkHashes(str(path), size, check=check, done=done)
        try:
            if self._hashes.size != record.bytes:
                raise ArtifactError(f"{self._hashes.size} bytes, the manifest says {record.bytes}", where=str(path))
            self.chunks = _chunks(record)
        except BaseException:
            self._hashes.close()
            raise
        self.bytes = record.bytes - data
        pages = self._hashes.pages
        self.mapped = None if pages is None else np.frombuffer(pages, np.uint8)  # unmapped when the last view of it goes

    @property
    def locked(self) -> LockedPages | None:
        """Its pages, where they are locked for the device; they are unlocked when it is closed."""
        return self._hashes.locked

    def lock(self, pages: LockedPages) -> bool:
        """Lock its pages by `pages`; False if they cannot be."""
        if self.mapped is None or not pages.lock(self._hashes.address, self._hashes.size):
            return False
        self._hashes.locked = pages
        return True

    def read(self, chunk: Chunk, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the chunk's bytes. Raises ArtifactError if the file has become shorter."""
        if self.mapped is not None:
            np.copyto(out, self.mapped[chunk.start : chunk.end])
            return
        done = 0
        while done < len(out):
            read = os.preadv(self._hashes.descriptor, [out[done:].data], chunk.start + done)
            if not read:
                raise ArtifactError(f"ends at byte {chunk.start + done}", where=str(self.path))
            done += read

    def verify(self, chunk: Chunk, data: NDArray[np.uint8]) -> None:
        """Raise ArtifactError, naming file and chunk, unless `data` is what the manifest says of `chunk`."""
        self._compare(chunk, hashlib.sha256(data.data).hexdigest())

    def wait(self) -> None:
        """Wait until every chunk that is mapped has been hashed. Raises ArtifactError for the first that is damaged."""
        digests = self._hashes.wait()
        if self.check:
            # Where nothing is mapped there are none: whoever reads the chunks verifies them.
            for chunk, digest in zip(self.chunks, digests, strict=False):
                self._compare(chunk, digest)

    def close(self) -> None:
        """Stop, and let the file go. Nothing may use `mapped` any more."""
        self.mapped = None
        self._hashes.close()

    def _compare(self, chunk: Chunk, digest: str) -> None:
        if digest != chunk.sha256:
            raise ArtifactError(
                f"chunk {chunk.index} (bytes {chunk.start} … {chunk.end}) is damaged: its sha256 is not {chunk.sha256}",
                where=str(self.path),
                hint="Copy the file again from where the artifact was built.",
            )


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
