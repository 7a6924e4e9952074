"""What runs beside the chain of a capture may end when it likes: whatever order the launches run in, they leave the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from ouro_build.artifacts.plan import Launch, Pool, ProgramKey
from tests.kernel_harness import run_reference
from tests.programs import OUTLIVE, Programs

LAYERS = 6
"""The first two keep their scores without waiting; the others wait for what is two layers behind them, one after another."""
BESIDE = ("attention_select", "attention_retained", "retained_merge")
BUCKETS = (1, 4)
ORDERS = 12
After = list[set[int]]
"""The launches that each of a program's follows."""
Choice = Callable[[list[int]], int]
"""Which of the launches that may run runs next."""


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs("bfloat16", buckets=BUCKETS, prefill_buckets=(16,), layers=LAYERS)


class Capture:
    """The capture program of a bucket in a made-up state, with a hole where there are more rows; in any order."""

    def __init__(self, programs: Programs, bucket: int) -> None:
        key = ProgramKey("recurrent", bucket, "capture")
        programs.enter(key, [i != 2 for i in range(bucket)])
        self._programs = programs
        self._before = programs.snapshot()
        self._calls = programs.launches(key)
        self.launches = [launch for launch, _ in self._calls]
        self.after: After = [{at for at, _ in launch.after} for launch in self.launches]
        self._serial = self._left(range(len(self._calls)))
        for pool in (Pool.KV, Pool.STATE, Pool.REFERENCES):
            assert not np.array_equal(self._serial[pool], self._before[pool]), f"nothing is left in {pool}: this tests nothing"

    def differs(self, order: Sequence[int]) -> list[Pool]:
        """The pools in which that order leaves other bytes than the one in which the launches were recorded."""
        found = self._left(order)
        return [pool for pool in OUTLIVE if not np.array_equal(found[pool], self._serial[pool])]

    def chain_first(self, ready: list[int]) -> int:
        """The chain as far as it can go, what is beside it where nothing else can run."""
        return min(ready, key=lambda at: (beside(self.launches[at]), at))

    def chain_last(self, ready: list[int]) -> int:
        """The chain only where nothing beside it can run."""
        return min(ready, key=lambda at: (not beside(self.launches[at]), at))

    def _left(self, order: Sequence[int]) -> dict[Pool, NDArray[np.uint8]]:
        self._programs.restore(self._before)
        for at in order:
            run_reference(*self._calls[at], self._programs.values)
        return self._programs.snapshot()


def beside(launch: Launch) -> bool:
    return launch.specialization.kernel in BESIDE


def in_order(after: After, choose: Choice) -> list[int]:
    """All launches in an order in which each comes later than those it follows."""
    order: list[int] = []
    while len(order) < len(after):
        ready = [at for at in range(len(after)) if at not in order and after[at] <= set(order)]
        order.append(choose(ready))
    return order


def joins_two_layers_on(capture: Capture) -> Iterator[tuple[int, int]]:
    """(launch of the chain, launch beside it two layers before that it waits for)."""
    for at, launch in enumerate(capture.launches):
        if launch.specialization.kernel == "attention_capture":
            yield from ((at, other) for other in capture.after[at] if beside(capture.launches[other]))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_order_leaves_what_the_recorded_one_does(programs: Programs, bucket: int) -> None:
    capture, random = Capture(programs, bucket), Random(bucket)
    choices: list[Choice] = [capture.chain_first, capture.chain_last, *[random.choice] * ORDERS]
    orders = {tuple(in_order(capture.after, choose)) for choose in choices}
    assert len(orders) >= ORDERS
    for order in orders:
        assert not capture.differs(order), order


@pytest.mark.parametrize("bucket", BUCKETS)
def test_each_wait_two_layers_on_is_needed(programs: Programs, bucket: int) -> None:
    """Without any one of them the chain, run ahead, overwrites what is still to be read: so the orders do share memory."""
    capture = Capture(programs, bucket)
    joins = list(joins_two_layers_on(capture))
    assert len(joins) == LAYERS - 2
    assert all(capture.launches[later].named()["layer"] == 2 + i for i, (later, _) in enumerate(joins))
    assert all(a < b for a, b in pairwise(joins))
    for later, other in joins:
        without = [follows - {other} if at == later else follows for at, follows in enumerate(capture.after)]
        assert capture.differs(in_order(without, capture.chain_first)), (later, other)
