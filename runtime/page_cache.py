"""Files in and out of the page cache, so that a start from a cold disk can be measured."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

DROP = Path("/proc/sys/vm/drop_caches")
Dropped = Literal["drop_caches", "fadvise"]


def drop(files: Iterable[Path]) -> Dropped:
    """Put `files` out of the page cache, with all others where that is allowed; returns the way it went.

    `fadvise` needs no rights, and leaves what another process has mapped; pages that are not on the disk yet are written first.
    """
    os.sync()
    try:
        DROP.write_text("3\n")
    except OSError:
        for file in files:
            _forget(file)
        return "fadvise"
    return "drop_caches"


def resident_share(files: Iterable[Path]) -> float:
    """Share of the files' pages that are in memory; 0 for no files."""
    found = [_resident(file) for file in files if file.stat().st_size]
    pages = sum(total for _, total in found)
    return sum(present for present, _ in found) / pages if pages else 0.0


def _forget(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _resident(file: Path) -> tuple[int, int]:
    """(pages in memory, pages) of a file that is not empty."""
    size = file.stat().st_size
    count = -(-size // mmap.PAGESIZE)
    with file.open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    present = np.zeros(count, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, out = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_void_p(present.ctypes.data)
    if libc.mincore(address, ctypes.c_size_t(size), out):
        raise OSError(ctypes.get_errno(), "mincore", str(file))
    return int((present & 1).sum()), count
