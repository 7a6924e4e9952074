"""Where the pools live. Executors and the engine see memory only through this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.plan import Pool

ALIGNMENT = 256
"""Every pool starts, and every buffer is placed, at a multiple of this many bytes."""


class Pending(Protocol):
    """Bytes on their way from a pool to the host."""

    def result(self) -> NDArray[np.uint8]:
        """The bytes as the work submitted before the read left them; later work does not change them.

        Waits for that work alone. May be called again. Raises DeviceError if the work failed or the memory was given back.
        """


class Memory(Protocol):
    """The pools of one worker, on a device or on the host. All work is in order, as on one CUDA stream."""

    def base(self, pool: Pool) -> int:
        """Address of the pool's first byte; 0 for a pool of no bytes."""

    def size(self, pool: Pool) -> int:
        """Bytes of the pool."""

    def write(self, pool: Pool, offset: int, data: NDArray[np.generic]) -> None:
        """Put contiguous `data` at `offset` bytes, after the work already submitted. `data` may be reused at once."""

    def read(self, pool: Pool, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Copy `nbytes` out, waiting for the work already submitted."""

    def read_later(self, pool: Pool, offset: int, nbytes: int) -> Pending:
        """Submit a copy of `nbytes` to the host, after the work already submitted, without waiting for it.

        Any number may be under way. The room for them is fixed: once it is full, a read waits for the earliest of them, whose
        bytes are kept.
        """

    def fill(self, pool: Pool, byte: int) -> None:
        """Set every byte of the pool, after the work already submitted."""

    def fill_lines(self, pool: Pool, offset: int, pitch: int, width: int, lines: int, byte: int) -> None:
        """Set `width` bytes of each of `lines` lines, the first at `offset`, one every `pitch` bytes; after the work already
        submitted. `lines` and `width` are at least 1, `pitch` at least `width`.
        """

    def repeat(self, pool: Pool, nbytes: int) -> None:
        """Fill the pool with copies of its first `nbytes`, the last one cut, after the work already submitted."""

    def synchronize(self) -> None:
        """Wait for the work already submitted. Raises DeviceError if any of it failed."""

    def close(self) -> None:
        """Give the memory back."""


def check_range(memory: Memory, pool: Pool, offset: int, nbytes: int) -> None:
    """Raise DeviceError unless [offset, offset + nbytes) lies inside `pool`."""
    if offset < 0 or nbytes < 0 or offset + nbytes > memory.size(pool):
        raise DeviceError(
            f"access to bytes {offset} … {offset + nbytes} of a pool of {memory.size(pool)}", where=pool.name.lower()
        )


def doublings(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the copies from the pool's start that spread its first `nbytes` over all `size` bytes."""
    done = nbytes
    while 0 < done < size:
        step = min(done, size - done)
        yield done, step
        done += step


class Arrived:
    """Bytes that were on the host already: a `Pending` that does not wait."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data

    def result(self) -> NDArray[np.uint8]:
        return self._data


class HostMemory:
    """Pools in ordinary memory, for the reference executor on a machine without a GPU.

    `weights` are the weights pool's bytes where they are in memory already; it is then not allocated again.
    """

    def __init__(self, sizes: dict[Pool, int], weights: NDArray[np.uint8] | None = None) -> None:
        self._arenas = {} if weights is None else {Pool.WEIGHTS: weights}
        self._arenas |= {pool: _arena(size) for pool, size in sizes.items() if pool not in self._arenas}

    def arena(self, pool: Pool) -> NDArray[np.uint8]:
        """The pool's bytes, writable."""
        return self._arenas[pool]

    def base(self, pool: Pool) -> int:
        return int(self._arenas[pool].ctypes.data) if self.size(pool) else 0

    def size(self, pool: Pool) -> int:
        arena = self._arenas.get(pool)
        return 0 if arena is None else len(arena)

    def write(self, pool: Pool, offset: int, data: NDArray[np.generic]) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        check_range(self, pool, offset, len(raw))
        self._arenas[pool][offset : offset + len(raw)] = raw

    def read(self, pool: Pool, offset: int, nbytes: int) -> NDArray[np.uint8]:
        check_range(self, pool, offset, nbytes)
        return self._arenas[pool][offset : offset + nbytes].copy()

    def read_later(self, pool: Pool, offset: int, nbytes: int) -> Pending:
        return Arrived(self.read(pool, offset, nbytes))

    def fill(self, pool: Pool, byte: int) -> None:
        if self.size(pool):
            self._arenas[pool][:] = byte

    def fill_lines(self, pool: Pool, offset: int, pitch: int, width: int, lines: int, byte: int) -> None:
        check_range(self, pool, offset, (lines - 1) * pitch + width)
        start = self._arenas[pool][offset:]
        np.lib.stride_tricks.as_strided(start, (lines, width), (pitch, 1))[:] = byte

    def repeat(self, pool: Pool, nbytes: int) -> None:
        check_range(self, pool, 0, nbytes)
        for done, size in doublings(nbytes, self.size(pool)):
            arena = self._arenas[pool]
            arena[done : done + size] = arena[:size]

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        self._arenas.clear()


def _arena(size: int) -> NDArray[np.uint8]:
    """`size` zero bytes starting at a multiple of ALIGNMENT; pages are taken only when touched."""
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -int(raw.ctypes.data) % ALIGNMENT
    return raw[start : start + size]
