"""What the pools held at some moment, kept to be compared with what they hold later, every byte of it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.runtime.memory import HostMemory, Memory
from ouro_build.runtime.reference import pool_tensors, require_torch

COMPARED = (Pool.KV, Pool.REFERENCES, Pool.STATE, Pool.IO)
"""The pools through which programs leave anything behind."""
_PIECE = 4 << 20
"""Bytes that are copied to the host at a time: few enough to stay in its cache until they are compared."""
_CHUNK = 256 << 20
"""Bytes that torch compares at a time, which bounds what it takes for intermediate results."""
_SPARE = 4 << 30
"""Bytes of device memory that a copy leaves to those results and to the reference."""


class Snapshot(Protocol):
    """A copy of the pools of COMPARED, whole; its room is taken once, with the first copy."""

    def take(self) -> None:
        """Keep what the pools hold after the work already submitted, in place of what was kept before."""

    def same(self) -> bool:
        """Whether the pools hold, in every byte, what is kept, after the work already submitted."""


class HostSnapshot:
    """A copy on the host, which needs no torch. What it is compared with is copied to the host in small pieces."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[Pool, NDArray[np.uint8]] = {}

    def take(self) -> None:
        self._kept = self._kept or {pool: np.empty(self._memory.size(pool), np.uint8) for pool in COMPARED}
        for pool, kept in self._kept.items():
            for at in range(0, len(kept), _PIECE):
                kept[at : at + _PIECE] = self._piece(pool, at)

    def same(self) -> bool:
        return all(
            np.array_equal(kept[at : at + _PIECE], self._piece(pool, at))
            for pool, kept in self._kept.items()
            for at in range(0, len(kept), _PIECE)
        )

    def _piece(self, pool: Pool, at: int) -> NDArray[np.uint8]:
        return self._memory.read(pool, at, min(_PIECE, self._memory.size(pool) - at))


def parts_of(buffer: Buffer, which: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The part of each line of the buffer that is in `which` [lines]: of keys and values its plane, as later layers carry more
    rounding; other buffers have one part."""
    first = buffer.shape[0] if buffer.pool is Pool.KV else 1
    return np.flatnonzero(which) * (first if isinstance(first, int) else 1) // len(which)


class TorchSnapshot:
    """A copy made and compared by torch where the pools are, on CUDA device `device` or on the host.

    Where the device has no room for the copy, it is kept on the host, and compared on the device piece by piece.
    """

    def __init__(self, memory: Memory, device: int = 0) -> None:
        self._torch = require_torch()
        self._memory = memory
        self._device = None if isinstance(memory, HostMemory) else device
        self._now = {pool: tensor for pool, tensor in pool_tensors(memory, device).items() if pool in COMPARED}
        self._kept: dict[Pool, Any] = {}

    def take(self) -> None:
        self._memory.synchronize()
        if not self._kept:
            where = self._where()
            self._kept = {pool: self._torch.empty_like(tensor, device=where) for pool, tensor in self._now.items()}
        for pool, tensor in self._now.items():
            self._kept[pool].copy_(tensor)
        if self._device is not None:  # torch works on a stream of its own
            self._torch.cuda.synchronize(self._device)

    def same(self) -> bool:
        self._memory.synchronize()
        pairs = ((self._kept[pool].split(_CHUNK), now.split(_CHUNK)) for pool, now in self._now.items())
        return all(self._torch.equal(a.to(b.device), b) for kept, now in pairs for a, b in zip(kept, now, strict=True))

    def differing(self, buffer: Buffer) -> Any:
        """Which lines of `buffer`, one for each of its last dimension, the pools now hold otherwise: bool tensor [lines].

        `buffer` is in a pool of COMPARED. Waits for the work already submitted.
        """
        self._memory.synchronize()
        kept, now = self._lines(buffer)
        pieces = (t.split(max(1, _CHUNK // t.shape[1])) for t in (kept, now))
        return self._torch.cat([(a.to(b.device) != b).any(1) for a, b in zip(*pieces, strict=True)])

    def lines(self, buffer: Buffer, which: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
        """The lines `which` of `buffer`, as kept and as they are now: uint8 [lines, bytes of a line] each. And their parts."""
        kept, now = (t[which.to(t.device)].cpu().numpy() for t in self._lines(buffer))
        return kept, now, parts_of(buffer, which.cpu().numpy())

    def _lines(self, buffer: Buffer) -> tuple[Any, Any]:
        width = DTYPES[buffer.dtype].bytes * int(buffer.shape[-1] if isinstance(buffer.shape[-1], int) else 1)
        kept, now = self._kept[buffer.pool], self._now[buffer.pool]
        end = buffer.offset + (buffer.bytes or len(now))  # a buffer of a load-time size fills its pool
        return kept[buffer.offset : end].reshape(-1, width), now[buffer.offset : end].reshape(-1, width)

    def _where(self) -> str:
        if self._device is None:
            return "cpu"
        free, _ = self._torch.cuda.mem_get_info(self._device)
        return f"cuda:{self._device}" if free >= sum(map(len, self._now.values())) + _SPARE else "cpu"
