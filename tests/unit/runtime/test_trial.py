"""A trial sees one bit that differs between executors, and what the reference does not say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.runtime.executor import Executor, ExecutorName
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.trial import TOLERANCE, Compared, Trial, line_difference
from tests.reference_worker import GOLDEN, ReferenceWorker, reference_worker

KEY = ProgramKey("coda", 1)


@cache
def worker() -> ReferenceWorker:
    return reference_worker(str(GOLDEN / "mha-fp32"), buckets=(1, 2), prefill_buckets=(16,), max_context=64, kv_blocks=64)


class Flipping:
    """The reference, but for `mask` over byte `at` of the logits, or of `pool`, of every run in `runs` (None: every one)."""

    def __init__(
        self, name: ExecutorName, mask: int = 0, at: int = 0, runs: Sequence[int] | None = None, pool: Pool | None = None
    ) -> None:
        self.name: ExecutorName = name
        self._pool = pool
        self._mask, self._at, self._runs, self._count = mask, at, runs, 0
        self._inner: Any = worker().steps._dispatcher._executors[0]

    def has(self, key: ProgramKey) -> bool:
        return bool(self._inner.has(key))

    def run(self, key: ProgramKey) -> None:
        self._inner.run(key)
        if self._runs is None or self._count in self._runs:
            logits = next(b for b in worker().preparation.targets[0].index.buffers if b.name == "logits")
            start = logits.offset if self._pool is None else 0
            worker().memory.arena(self._pool or Pool.IO)[start + self._at] ^= np.uint8(self._mask)
        self._count += 1

    def close(self) -> None:
        """Nothing is held."""


def compare(*executors: Executor, reference: Executor | None = None) -> Compared:
    w = worker()
    pools = Pools(w.preparation.targets[0].index, w.memory, w.kv_blocks, executors, {}, lambda: None)
    manifest = cast(Manifest, SimpleNamespace(model=w.steps.model, geometry=w.steps.geometry))
    return Trial(manifest, pools, reference).compare(KEY)


def test_equal_executors_are_right() -> None:
    found = compare(Flipping("graph"), Flipping("launch"), reference=Flipping("reference"))
    assert found == Compared(1, ("graph", "launch"), True, 0.0)
    assert found.right
    assert compare(Flipping("graph")) == Compared(1, ("graph",), True, None)


def test_one_bit_between_graph_and_launch_is_seen() -> None:
    found = compare(Flipping("graph", mask=1), Flipping("launch"), reference=Flipping("reference"))
    assert (found.bit_equal, found.right) == (False, False)
    assert found.error == 0.0, "the launches are what is held against the reference"


@pytest.mark.parametrize("pool", [Pool.KV, Pool.STATE, Pool.IO])
@pytest.mark.parametrize("reference", [None, "reference"])
def test_a_bit_anywhere_in_the_pools_is_seen(pool: Pool, reference: ExecutorName | None) -> None:
    """Also by programs that have no business there: `coda` writes no keys."""
    for at in (0, worker().memory.size(pool) - 1):
        truth = None if reference is None else Flipping(reference)
        found = compare(Flipping("graph", 1, at, pool=pool), Flipping("launch"), reference=truth)
        assert not found.bit_equal
        assert compare(Flipping("graph"), Flipping("launch"), reference=truth).right


def test_what_only_one_side_writes_is_seen() -> None:
    """The first value of the state is a slot's: an integer, so any difference is beyond all tolerance."""

    def error(executors: int, reference: int) -> float | None:
        truth = Flipping("reference", reference, pool=Pool.STATE)
        both = (Flipping("graph", executors, pool=Pool.STATE), Flipping("launch", executors, pool=Pool.STATE))
        found = compare(*both, reference=truth)
        assert found.bit_equal
        return found.error

    assert [error(0, 0), error(1, 1)] == [0.0, 0.0]
    assert [error(1, 0), error(0, 1), error(1, 2)] == [float("inf")] * 3


def test_an_executor_alone_must_repeat_itself() -> None:
    assert not compare(Flipping("launch", mask=1, runs=[1])).right
    assert compare(Flipping("launch", mask=1)).right


def test_what_both_do_wrong_is_seen_against_the_reference() -> None:
    sign = 0x80, 3
    found = compare(Flipping("graph", *sign), Flipping("launch", *sign), reference=Flipping("reference"))
    assert found.bit_equal
    assert found.error is not None
    assert found.error > 1
    assert not found.right


def _bits(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values, np.float32).view(np.uint8)


def tolerances(got: NDArray[np.float64], wanted: NDArray[np.float64], parts: int = 1) -> float:
    """bfloat16's tolerances between float32 lines, in so many parts of as many lines."""
    of = np.arange(len(got)) * parts // len(got)
    return line_difference("float32", _bits(got), _bits(wanted), of) / TOLERANCE["bfloat16"]


def usual(lines: int, elements: int, error: float, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lines with errors that bfloat16 leaves after many layers, and what was wanted."""
    draw = np.random.default_rng(seed)
    wanted = draw.standard_normal((lines, elements))
    wanted = np.sign(wanted) * np.maximum(abs(wanted), 0.5)
    return wanted + error * draw.standard_normal((lines, elements)), wanted


@pytest.mark.parametrize(
    ("lines", "elements", "error", "parts"), [(1, 128, 0.03, 1), (1, 1, 0.02, 1), (2048, 1, 0.02, 2048), (19200, 128, 0.03, 24)]
)
def test_rounding_alone_is_no_difference(lines: int, elements: int, error: float, parts: int) -> None:
    """Errors as bfloat16 leaves them after 24 layers stay under its tolerance, however few or many lines there are."""
    for seed in range(20):
        assert tolerances(*usual(lines, elements, error, seed), parts) < 1


def test_a_little_more_than_rounding_in_one_part_is_a_difference() -> None:
    """As of the values of one layer of 24: 0.05 of a line where 0.02 is usual."""
    got, wanted = usual(24 * 400, 128, 0.02)
    got[2000:2400] += 0.05 * np.random.default_rng(1).standard_normal((400, 128))
    assert tolerances(got, wanted, parts=1) < 1 < tolerances(got, wanted, parts=24)


@pytest.mark.parametrize(("lines", "elements", "off"), [(8, 1, 0.3), (2048, 1, 0.3), (1, 128, 0.2), (20000, 128, 0.2)])
def test_one_line_that_is_a_little_wrong_is_a_difference(lines: int, elements: int, off: float) -> None:
    got, wanted = usual(lines, elements, 0.01)
    got[lines // 2] = wanted[lines // 2] * (1 + off)
    if lines > 1 and elements == 1:
        wanted[lines // 2], got[lines // 2] = 1.0, 1.0 + off  # no number shorter than the median
    assert tolerances(got, wanted) > 1


def test_what_is_no_number_is_a_difference() -> None:
    got, wanted = usual(100, 16, 0.01)
    for bad, there in ((np.nan, got), (np.inf, got), (np.nan, wanted), (-np.inf, wanted)):
        kept, there[50, 3] = there[50, 3], bad
        assert tolerances(got, wanted) == float("inf")
        there[50, 3] = kept
    got[50, 3] = wanted[50, 3] = np.inf
    assert tolerances(got, wanted) < 1
