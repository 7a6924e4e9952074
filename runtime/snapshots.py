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


class TorchSnapshot:
    """A copy where the pools are, made and compared there by torch, which sees them on CUDA device `device` or on the host.

    `now` and `kept`: the pools of COMPARED that have bytes, as uint8 tensors.
    """

    def __init__(self, memory: Memory, device: int = 0) -> None:
        self._torch = require_torch()
        self._memory = memory
        self._device = device
        self.now = {pool: tensor for pool, tensor in pool_tensors(memory, device).items() if pool in COMPARED}
        self.kept: dict[Pool, Any] = {}

    def take(self) -> None:
        self._memory.synchronize()
        self.kept = self.kept or {pool: self._torch.empty_like(tensor) for pool, tensor in self.now.items()}
        for pool, tensor in self.now.items():
            self.kept[pool].copy_(tensor)
        if not isinstance(self._memory, HostMemory):  # torch works on a stream of its own
            self._torch.cuda.synchronize(self._device)

    def same(self) -> bool:
        self._memory.synchronize()
        pairs = [zip(self.kept[p].split(_CHUNK), now.split(_CHUNK), strict=True) for p, now in self.now.items()]
        return all(self._torch.equal(a, b) for pair in pairs for a, b in pair)


def written_lines(buffer: Buffer, before: TorchSnapshot, after: TorchSnapshot) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The lines of `buffer`, one for each of its last dimension, that `after` or the pools now have otherwise than `before`.

    Returns them from `after` and from the pools, uint8 [lines, bytes of a line] each. The work submitted must be finished.
    """
    kinds = (before.kept, after.kept, after.now)
    lines = [_lines(buffer, tensors[buffer.pool]) for tensors in kinds]
    got, wanted = [], []
    for old, left, right in zip(*(t.split(max(1, _CHUNK // t.shape[1])) for t in lines), strict=True):
        written = ((left != old) | (right != old)).any(1)
        got.append(left[written].cpu().numpy())
        wanted.append(right[written].cpu().numpy())
    return np.concatenate(got), np.concatenate(wanted)


def _lines(buffer: Buffer, pool: Any) -> Any:
    size = buffer.bytes or len(pool)  # a buffer of a load-time size fills its pool
    width = DTYPES[buffer.dtype].bytes * int(buffer.shape[-1] if isinstance(buffer.shape[-1], int) else 1)
    return pool[buffer.offset : buffer.offset + size].reshape(-1, width)
