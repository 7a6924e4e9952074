"""Every program that is asked for is counted: by its graph, by another path with the reason, or as refused."""

from __future__ import annotations

import pytest

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import FallbackCount, KeyCount, Reason
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
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
