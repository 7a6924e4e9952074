"""The retained mass of every capture, gathered behind the steps: a copy a step, read once the step is waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.plan import Buffer
from ouro_build.artifacts.records import MassHistogram
from ouro_build.runtime.memory import Memory, Pending

BINS = 20
"""Equal parts of 0 … 1."""
_MOST = 64
"""Copies that are kept unread: where nobody waits for steps, the eldest have long arrived."""


def check_retained_mass(geometry: Geometry, artifact: str) -> None:
    """Raise UsageError unless rows of `artifact` capture something whose mass could be kept."""
    if geometry.references:
        return
    built = "retains every key" if len(geometry.sparse_modes) > 1 else "was built without sparse modes"
    hint = "Leave it out, or build with --sparse-modes dense,capture,consume,mixed --key-retention R, R below 1."
    raise UsageError(f"{artifact} {built}: no retained mass to record", where="--retained-mass", hint=hint)


class RetainedMass:
    """A histogram over the captures of every layer and query head. `buffer` is float32 [slots, layers, heads].

    A step's masses are copied to the host in stream order, from the first slot that it captured into to the last, and
    looked at when that step's outcome has arrived anyway: nothing waits for them.
    """

    def __init__(self, memory: Memory, buffer: Buffer) -> None:
        self._memory = memory
        self._buffer = buffer
        self._slot_bytes = buffer.bytes // buffer.sizes[0]
        self._pending: deque[tuple[Pending, NDArray[np.int64]]] = deque()
        self._taken = 0
        self._counts = np.zeros(BINS, np.int64)
        self._sum, self._least = 0.0, 1.0
        self._bytes, self._seconds = 0, 0.0

    @property
    def submitted(self) -> int:
        """Copies that were submitted so far."""
        return self._taken + len(self._pending)

    def captured(self, slots: Sequence[int]) -> None:
        """A capture into `slots` was submitted: submit the copy of their masses."""
        if not slots:
            return
        began = time.perf_counter()
        first, last = min(slots), max(slots)
        size = (last - first + 1) * self._slot_bytes
        read = self._memory.read_later(self._buffer.pool, self._buffer.offset + first * self._slot_bytes, size)
        self._pending.append((read, np.array(slots) - first))
        self._bytes += size
        self._seconds += time.perf_counter() - began
        if len(self._pending) > _MOST:
            self.take(self._taken + 1)

    def take(self, submitted: int) -> None:
        """Look at the first `submitted` copies of all."""
        began = time.perf_counter()
        while self._pending and self._taken < submitted:
            read, slots = self._pending.popleft()
            self._taken += 1
            mass = read.result().view(np.float32).reshape(-1, *self._buffer.sizes[1:])[slots]
            self._counts += np.bincount((mass * BINS).astype(np.int64).clip(0, BINS - 1).reshape(-1), minlength=BINS)
            self._sum += float(mass.sum(dtype=np.float64))
            self._least = min(self._least, float(mass.min()))
        self._seconds += time.perf_counter() - began

    def clear(self) -> None:
        """Forget what was seen."""
        self.take(self.submitted)
        self._counts[:] = 0
        self._sum, self._least, self._bytes, self._seconds = 0.0, 1.0, 0, 0.0

    def record(self) -> MassHistogram:
        """What was seen so far. Waits for copies that are on their way."""
        self.take(self.submitted)
        values = int(self._counts.sum())
        return MassHistogram(
            values=values,
            mean=self._sum / values if values else 0.0,
            least=self._least if values else 0.0,
            counts=tuple(self._counts.tolist()),
            bytes=self._bytes,
            seconds=round(self._seconds, 6),
        )
