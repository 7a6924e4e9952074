"""Trying a program in made-up states: its executors against each other, bit for bit, and against the reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.scenes import Scene, live_patterns
from ouro_build.runtime.snapshots import COMPARED, HostSnapshot, Snapshot, TorchSnapshot

# A program is hundreds of kernels deep, and in bfloat16 each rounds its outputs to 8 bits: two right executions differ by the
# random sum of those roundings, some units in a row's last place. float32 leaves only the order of sums. The loop of the 1.4B
# model with 24 layers on an H200, graph against reference: 0.011 to 0.031 on the whole; of a million lines of keys and values
# the farthest at 0.046, of 12,000 attention outputs at 0.115, of 1,253 logits of the exit gate at 0.099.
TOLERANCE = {"bfloat16": 0.04, "float32": 1e-4}
"""How far lines may lie from the reference's on the whole, as a share of their length (see `line_difference`)."""
_FARTHEST, _FARTHEST_NUMBER, _VECTOR = 4.0, 6.0, 16
"""How many tolerances a single line may be off: one of which `_VECTOR` elements or more differ, and one of fewer. A line that
is wrong lies about its own length away, 25 of bfloat16's tolerances."""
_SMALLEST = 1e-30
_CHOICES = ("reference_keys", "reference_contribution")
"""Which keys are retained hangs on the last bits of their scores: the reference may choose others among near ties."""


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

    Every run starts from the same bytes in all pools but the weights. Between executors every byte of the pools of COMPARED
    is compared, whether a program was to write it or not; with the reference every line of the buffers there that it or
    the executor wrote, within TOLERANCE. Where there is a reference, there is torch: all is then compared where the pools
    are, on CUDA device `device` if they are on one. Otherwise they are copied to the host.

    The pools must have at least `blocks_needed` KV blocks, and are overwritten but for the weights.
    """

    def __init__(self, manifest: Manifest, pools: Pools, reference: Executor | None, device: int = 0) -> None:
        self._manifest, self._pools = manifest, pools
        self._buffers = {b.name: b for b in pools.index.buffers}
        self._reference = reference
        self._torch = None if reference is None else TorchSnapshot(pools.memory, device)
        self._got: Snapshot = self._torch or HostSnapshot(pools.memory)

    def compare(self, key: ProgramKey) -> Compared:
        """Run `key` in every arrangement of live rows. Raises DeviceError if it cannot be run."""
        executors = [e for e in self._pools.executors if e.has(key)]
        runs = executors if len(executors) > 1 else executors * 2
        patterns = live_patterns(key.bucket)
        equal, error = True, None if self._reference is None else 0.0
        for live in patterns:
            scene = Scene(self._manifest.model, self._manifest.geometry, key, live, self._pools.kv_blocks)
            self._put(scene)
            runs[-1].run(key)
            self._got.take()
            for other in runs[:-1]:
                self._put(scene)
                other.run(key)
                equal &= self._got.same()
            if self._reference is not None and self._torch is not None and error is not None:
                error = max(error, self._error(key, scene, self._reference, self._torch))
        return Compared(len(patterns), tuple(e.name for e in executors), equal, error)

    def _put(self, scene: Scene) -> None:
        scene.write(self._pools.memory, self._buffers)

    def _error(self, key: ProgramKey, scene: Scene, reference: Executor, got: TorchSnapshot) -> float:
        """Run the reference; the largest difference from it over the lines that either wrote, in tolerances."""
        self._put(scene)
        compared = [buffer for buffer in self._buffers.values() if buffer.pool in COMPARED and buffer.name not in _CHOICES]
        wrote = [got.differing(buffer) for buffer in compared]
        reference.run(key)
        # A line that the reference alone wrote differs from what was got.
        written = [which | got.differing(buffer) for which, buffer in zip(wrote, compared, strict=True)]
        pairs = zip(compared, written, strict=True)
        worst = max((line_difference(buffer.dtype, *got.lines(buffer, which)) for buffer, which in pairs), default=0.0)
        return worst / TOLERANCE[self._manifest.model.dtype]


def line_difference(dtype: str, got: NDArray[np.uint8], wanted: NDArray[np.uint8], parts: NDArray[np.int64]) -> float:
    """How far lines of a buffer lie apart, as a share of their length: the root mean square of |got - wanted| / |wanted|, in
    Euclidean lengths, over the lines of each of `parts` (their numbers from 0), of the part where it is largest; or what a
    single line comes to that is farther off than one line may be.

    The mean of few numbers says little: that of n normal errors exceeds the usual by the factor 1 + 4 / sqrt(2 n) in fewer
    than one case of 7,000. So it is divided by that, n being the elements that differ: much for one number, such as a row's
    exit gate, next to nothing for vectors.

    Infinite where integers differ, or values that nobody wrote, or where one side is no number. A line much shorter than the
    others, such as a value vector that almost cancels out, carries the rounding of longer vectors: its difference is taken as a
    share of the median length.
    """
    if not len(got) or np.array_equal(got, wanted):
        return 0.0
    if dtype not in ("bfloat16", "float32"):
        return float("inf")
    a, b = _floats(dtype, got), _floats(dtype, wanted)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    with np.errstate(invalid="ignore"):  # of infinities
        apart = np.where((a == b) | np.isnan(b), np.float32(0), a - b)
        lengths = _lengths(b)
        share = _lengths(apart) / np.maximum(lengths, max(float(np.median(lengths)), _SMALLEST))
    if not np.isfinite(share).all():
        return float("inf")
    differing = np.count_nonzero(apart, axis=1)
    lines, elements = np.bincount(parts), np.bincount(parts, differing)
    usual = np.sqrt(np.bincount(parts, np.square(share)) / np.maximum(lines, 1))
    by_chance = 1 + 4 / np.sqrt(2 * np.maximum(elements, 1))
    farthest = np.where(differing < _VECTOR, _FARTHEST_NUMBER, _FARTHEST)
    return max(float(np.max(usual / by_chance)), float(np.max(share / farthest)))


def _lengths(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Euclidean length of every row; values that nobody wrote are still poison and count as none."""
    length: NDArray[np.float64] = np.sqrt(np.nansum(np.square(rows, dtype=np.float64), axis=1))
    return length


def _floats(dtype: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    if dtype == "float32":
        return raw.view(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
