"""Every program that is asked for is counted: by its graph, by another path with the reason, or as refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import FallbackCount, KeyCount, Reason
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher, padded_to, replays_of
from ouro_build.runtime.executor import ExecutorName

GRAPH, BARE = ProgramKey("recurrent", 4), ProgramKey("recurrent", 8)


class Only:
    """An executor that has some keys and notes what it ran."""

    def __init__(self, name: ExecutorName, *keys: ProgramKey) -> None:
        self.name, self.keys = name, keys
        self.ran: list[ProgramKey] = []

    def has(self, key: ProgramKey) -> bool:
        return key in self.keys

    def run(self, key: ProgramKey) -> None:
        self.ran.append(key)

    def close(self) -> None:
        self.ran.clear()


def fallback(reason: Reason, rows: int, path: str, mode: str = "dense") -> FallbackCount:
    return FallbackCount(reason=reason, program="recurrent", mode=mode, rows=rows, path=path, count=1)


@given(st.integers(0, 200), st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True).map(sorted))
def test_a_batch_is_padded_or_split_into_as_few_replays_as_there_can_be(rows: int, buckets: list[int]) -> None:
    replays = replays_of(rows, buckets)
    assert sum(r.rows * r.times for r in replays) == rows
    assert sum(r.times for r in replays) == -(-rows // buckets[-1])
    for replay in replays:
        assert replay.bucket == padded_to(replay.rows, buckets) == min(b for b in buckets if b >= replay.rows)


def test_no_bucket_holds_more_than_the_largest() -> None:
    assert padded_to(5, (1, 4)) is None
    assert replays_of(9, (1, 4)) == ((4, 4, 2), (1, 1, 1))
    assert replays_of(0, (1, 4)) == ()


def test_the_first_executor_that_has_the_plan_runs_it() -> None:
    graph, launch, counter = Only("graph", GRAPH), Only("launch", GRAPH, BARE), CoverageCounter()
    dispatcher = Dispatcher((graph, launch), counter, None, {BARE: Reason.GRAPH_RESTORE_FAILED})
    dispatcher.run(GRAPH, 3)
    dispatcher.run(BARE, 5)
    assert (graph.ran, launch.ran) == ([GRAPH], [BARE])
    record = counter.record()
    assert record.keys == (
        KeyCount(program="recurrent", bucket=4, mode="dense", variant="", replays=1, live_rows=3, padded_rows=1),
    )
    assert record.fallbacks == (fallback(Reason.GRAPH_RESTORE_FAILED, 5, "launch"),)


def test_a_worker_without_graphs_says_why() -> None:
    launch, counter = Only("launch", GRAPH), CoverageCounter()
    Dispatcher((launch,), counter, Reason.GRAPHS_DISABLED, {}).run(GRAPH, 2)
    assert counter.record().fallbacks == (fallback(Reason.GRAPHS_DISABLED, 2, "launch"),)


def test_a_mode_that_was_not_built_is_refused_and_counted() -> None:
    counter = CoverageCounter()
    dispatcher = Dispatcher((Only("graph", GRAPH),), counter, None, {})
    with pytest.raises(RequestError, match=r"no plan for recurrent/4/consume \(mode_not_built\)\n.*inspect"):
        dispatcher.run(ProgramKey("recurrent", 4, "consume"), 3)
    assert counter.record().fallbacks == (fallback(Reason.MODE_NOT_BUILT, 3, "refused", "consume"),)
