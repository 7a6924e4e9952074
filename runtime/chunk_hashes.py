"""sha256 of a file's chunks on several threads, begun before it is known what they should be.

Imports almost nothing: hashing takes longest of all that start-up does, and begins first.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

from ouro_build.artifacts.chunks import CHUNK, CHUNKED_ABOVE
from ouro_build.runtime.locked_pages import LockedPages
from ouro_build.runtime.threads import Workers, spare_cores

RESERVED = 2
"""Cores left alone: for the interpreter, and for CUDA's start."""


class _View(ctypes.Structure):
    """Py_buffer, as far as it is read here."""

    _fields_ = (("buffer", ctypes.c_void_p), ("rest", ctypes.c_void_p * 16))


class ChunkHashes:
    """The file at `path`, mapped, and sha256 of every `chunk` bytes of it; by default of those that manifests have digests of.

    With `check` false its pages are brought in, and nothing is hashed. `pages` is None where the file system maps none, and
    then nothing is done. `done` is called when the threads end. Raises OSError if the file cannot be opened.
    """

    def __init__(
        self, path: str, chunk: int | None = None, *, check: bool = True, done: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self.check = path, check
        self.descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.descriptor).st_size
        self.chunk = chunk or (CHUNK if self.size > CHUNKED_ABOVE else max(1, self.size))
        self.pages = self._map()
        count = 0 if self.pages is None else -(-self.size // self.chunk)
        self._locked: LockedPages | None = None
        self._locking: Thread | None = None
        self._guard = Lock()
        self._closed = False
        self._digests = [""] * count
        self._workers = Workers(self._visit, count, spare_cores(RESERVED), done=done)

    def wait(self) -> list[str]:
        """Wait for all of it; the digests in order, in hexadecimal: empty where nothing was to be hashed."""
        self._workers.wait()
        return self._digests

    @property
    def locked(self) -> LockedPages | None:
        """Its pages, if they were locked for a device. Waits for who locks them now."""
        with self._guard:
            locking = self._locking
        if locking is not None:
            locking.join()
        return self._locked

    @locked.setter
    def locked(self, pages: LockedPages) -> None:
        self._locked = pages

    def lock_beside(self, lock: Callable[[], LockedPages | None]) -> None:
        """Have `lock` lock the pages on a thread of its own, unless the file was let go; None if it cannot."""

        def run() -> None:
            with suppress(Exception):  # whoever copies the file finds out that its pages are not locked
                self._locked = lock()

        with self._guard:
            if not self._closed:
                thread = Thread(target=run, name="lock")
                thread.start()
                self._locking = thread

    def unlock(self) -> None:
        """Unlock its pages, if they are locked or about to be: before their device's context goes."""
        pages, self._locked = self.locked, None
        if pages is not None:
            pages.unlock()

    @property
    def address(self) -> int:
        """Where the file is mapped; 0 if it is not."""
        if self.pages is None:
            return 0
        view = _View()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(self.pages), ctypes.byref(view), 0)
        address = view.buffer or 0
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
        return address

    def close(self) -> None:
        """Stop, unlock the pages, and let the file go. It stays mapped while something uses `pages`."""
        with self._guard:
            self._closed = True
        self._workers.stop()
        self.unlock()
        self.pages = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _map(self) -> mmap.mmap | None:
        try:
            return mmap.mmap(self.descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError):  # a file system that cannot, or an empty file
            return None

    def _visit(self, at: int) -> None:
        pages, start = self.pages, at * self.chunk
        if pages is None:
            return
        # One request for the whole chunk: page faults alone would read a cold file in small pieces.
        with suppress(OSError):  # it is advice
            os.posix_fadvise(self.descriptor, start, self.chunk, os.POSIX_FADV_WILLNEED)
        with memoryview(pages) as whole, whole[start : start + self.chunk] as view:
            if self.check:
                self._digests[at] = hashlib.sha256(view).hexdigest()
            else:
                bytes(view[:: mmap.PAGESIZE])  # locking pages that are mapped already is quicker
