"""Trying a program in made-up states: its executors against each other, bit for bit, and against the reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.scenes import Scene, live_patterns

# A program is hundreds of kernels deep, and in bfloat16 each rounds its outputs to 8 bits: two right executions differ by the
# random sum of those roundings, some units in a row's last place. float32 leaves only the order of sums.
TOLERANCE = {"bfloat16": 0.04, "float32": 1e-4}
"""How far a written row may lie from the reference's, as a share of its length (see `_buffer_difference`)."""
_SMALLEST = 1e-30
_COMPARED = (Pool.KV, Pool.REFERENCES, Pool.STATE, Pool.IO)
_CHOICES = ("reference_keys", "reference_contribution")
"""Which keys are retained hangs on the last bits of their scores: the reference may choose others among near ties."""
Snapshot = dict[Pool, NDArray[np.uint8]]


class Compared(NamedTuple):
    """What a trial saw of a key.

    `patterns` arrangements of live rows were run by each of `executors`; an executor alone was run twice. `bit_equal`: all
    runs left the same bits. `error` is the largest difference from the reference as a share of the tolerance, None where
    there was no reference.
    """

    patterns: int
    executors: tuple[str, ...]
    bit_equal: bool
    error: float | None

    @property
    def right(self) -> bool:
        """Whether nothing is amiss, as far as it was compared."""
        return self.bit_equal and (self.error is None or self.error <= 1.0)


class Trial:
    """Tries keys over `pools`, whose executors run the same plans; `reference` is the truth, None if there is none here.

    The pools must have at least `blocks_needed` KV blocks, and are overwritten but for the weights.
    """

    def __init__(self, manifest: Manifest, pools: Pools, reference: Executor | None) -> None:
        self._manifest, self._pools = manifest, pools
        self._buffers = {b.name: b for b in pools.index.buffers}
        self._reference = reference

    def compare(self, key: ProgramKey) -> Compared:
        """Run `key` in every arrangement of live rows. Raises DeviceError if it cannot be run."""
        executors = [e for e in self._pools.executors if e.has(key)]
        runs = executors if len(executors) > 1 else executors * 2
        patterns = live_patterns(key.bucket)
        equal, error = True, None if self._reference is None else 0.0
        for live in patterns:
            scene = Scene(self._manifest.model, self._manifest.geometry, key, live, self._pools.kv_blocks)
            before, got = self._run(scene, runs[-1], key)
            for other in runs[:-1]:
                again = self._run(scene, other, key)[1]
                equal &= all(np.array_equal(got[pool], again[pool]) for pool in got)
            if self._reference is not None and error is not None:
                error = max(error, self._difference(before, got, self._run(scene, self._reference, key)[1]))
        return Compared(len(patterns), tuple(e.name for e in executors), equal, error)

    def _run(self, scene: Scene, executor: Executor, key: ProgramKey) -> tuple[Snapshot, Snapshot]:
        scene.write(self._pools.memory, self._buffers)
        before = self._snapshot()
        executor.run(key)
        return before, self._snapshot()

    def _snapshot(self) -> Snapshot:
        memory = self._pools.memory
        return {pool: memory.read(pool, 0, memory.size(pool)) for pool in _COMPARED}

    def _difference(self, before: Snapshot, got: Snapshot, wanted: Snapshot) -> float:
        """The largest difference from the reference over all buffers, in tolerances; infinite where integers differ."""
        worst = 0.0
        for buffer in self._buffers.values():
            if buffer.pool in _COMPARED and buffer.name not in _CHOICES:
                rows = [_rows(buffer, s[buffer.pool]) for s in (before, got, wanted)]
                worst = max(worst, _buffer_difference(buffer, *rows) / TOLERANCE[self._manifest.model.dtype])
        return worst


def _rows(buffer: Buffer, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The buffer's bytes, one line for each of its last dimension."""
    size = buffer.bytes or len(raw)  # a buffer of a load-time size fills its pool
    width = DTYPES[buffer.dtype].bytes * int(buffer.shape[-1] if isinstance(buffer.shape[-1], int) else 1)
    return raw[buffer.offset : buffer.offset + size].reshape(-1, width)


def _buffer_difference(buffer: Buffer, before: NDArray[np.uint8], got: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> float:
    """Over the rows that either execution wrote: the largest |got - wanted| / |wanted|, in Euclidean lengths.

    A row much shorter than the buffer's others, such as a value vector that almost cancels out, carries the rounding of longer
    vectors: its difference is taken as a share of the median length.
    """
    written = ((got != before) | (wanted != before)).any(1)
    got, wanted = got[written], wanted[written]
    if not len(got) or np.array_equal(got, wanted):
        return 0.0
    if buffer.dtype not in ("bfloat16", "float32"):
        return float("inf")
    a, b = _floats(buffer.dtype, got), _floats(buffer.dtype, wanted)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    lengths, off = _lengths(b), _lengths(a - b)
    return float(np.max(off / np.maximum(lengths, max(float(np.median(lengths)), _SMALLEST))))


def _lengths(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Euclidean length of every row; values that nobody wrote are still poison and count as none."""
    length: NDArray[np.float64] = np.sqrt(np.nansum(np.square(rows, dtype=np.float64), axis=1))
    return length


def _floats(dtype: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    if dtype == "float32":
        return raw.view(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
