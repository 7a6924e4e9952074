"""Digests of files: sha256 of the whole, and of every 16 MiB of large ones, so that several threads can check them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import CHUNK, CHUNKED_ABOVE, FileRecord

_READ = 1 << 20
_T = TypeVar("_T")
COPY_AGAIN = "Copy the artifact again, or build it again."


def chunk_count(size: int) -> int:
    """Chunk digests that a file of `size` bytes has."""
    return -(-size // CHUNK) if size > CHUNKED_ABOVE else 0


def digest_files(root: Path, paths: Iterable[str], workers: int | None = None) -> tuple[FileRecord, ...]:
    """Records of the files `paths` (relative, forward slashes) under `root`, sorted by path. Raises OSError."""
    with ThreadPoolExecutor(workers or _workers()) as pool:
        pending = [_Pending(pool, root, path) for path in sorted(paths)]
        return tuple(p.record() for p in pending)


def verify_files(root: Path, records: Sequence[FileRecord], workers: int | None = None) -> None:
    """Check size and every digest of the files under `root`. Raises ArtifactError naming the first file that differs."""
    verify_sizes(root, records)
    with ThreadPoolExecutor(workers or _workers()) as pool:
        try:
            pending = [(record, _Pending(pool, root, record.path)) for record in records]
            for record, found in pending:
                _compare(record, found)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def verify_sizes(root: Path, records: Iterable[FileRecord]) -> None:
    """Check the sizes of the files under `root`. Raises ArtifactError naming the first file that differs."""
    for record in records:
        try:
            size = (root / record.path).stat(follow_symlinks=False).st_size
        except OSError as error:
            raise ArtifactError(f"cannot be read: {error.strerror}", where=record.path) from error
        check_size(record, size)


def check_size(record: FileRecord, size: int) -> None:
    """Raise ArtifactError unless the file has the size that the manifest gives it."""
    if size != record.bytes:
        raise ArtifactError(f"{size} bytes, {record.bytes} expected", where=record.path)


def check_bytes(record: FileRecord, data: bytes) -> None:
    """Raise ArtifactError unless `data` is the content that the manifest gives the file."""
    check_size(record, len(data))
    found = hashlib.sha256(data).hexdigest()
    if found != record.sha256:
        raise ArtifactError(f"sha256 is {found}, {record.sha256} expected", where=record.path)


class _Pending:
    """A file's digests while threads work on them."""

    def __init__(self, pool: ThreadPoolExecutor, root: Path, path: str) -> None:
        file = root / path
        self._path = path
        self.size = file.stat().st_size
        starts = range(0, self.size, CHUNK) if chunk_count(self.size) else ()
        # The whole of a large file takes longest: it starts first.
        self.whole = pool.submit(_sha256, file, 0, self.size)
        self.chunks = [pool.submit(_sha256, file, at, min(CHUNK, self.size - at)) for at in starts]

    def record(self) -> FileRecord:
        chunks = tuple(c.result() for c in self.chunks)
        return FileRecord(path=self._path, bytes=self.size, sha256=self.whole.result(), chunks=chunks)


def _compare(record: FileRecord, pending: _Pending) -> None:
    if len(pending.chunks) != len(record.chunks):
        raise ArtifactError(f"{len(record.chunks)} chunk digests, {len(pending.chunks)} expected", where=record.path)
    for i, (chunk, expected) in enumerate(zip(pending.chunks, record.chunks, strict=True)):
        found = _result(record, chunk)
        if found != expected:
            first, last = i * CHUNK, min((i + 1) * CHUNK, record.bytes)
            what = f"sha256 of bytes {first} … {last} is {found}, {expected} expected"
            raise ArtifactError(what, where=record.path, hint=COPY_AGAIN)
    found = _result(record, pending.whole)
    if found != record.sha256:
        raise ArtifactError(f"sha256 is {found}, {record.sha256} expected", where=record.path, hint=COPY_AGAIN)


def _result(record: FileRecord, future: Future[_T]) -> _T:
    try:
        return future.result()
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=record.path) from error


def _sha256(path: Path, start: int, size: int) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path, start, size):
        digest.update(piece)  # releases the GIL
    return digest.hexdigest()


def _pieces(path: Path, start: int, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _READ)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size:
            count = file.readinto(buffer[: min(size, _READ)])
            if not count:
                return
            yield buffer[:count]
            size -= count


def _workers() -> int:
    return min(16, os.cpu_count() or 1)
