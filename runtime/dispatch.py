"""Which graphs a batch takes, which path a program runs by, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import Reason
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.executor import Executor


class Replays(NamedTuple):
    """`times` replays at `bucket`, each of `rows` live rows."""

    bucket: int
    rows: int
    times: int


def padded_to(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest of `buckets` (ascending) that holds `rows` live rows; None if none does."""
    return next((bucket for bucket in buckets if bucket >= rows), None)


def replays_of(rows: int, buckets: Sequence[int]) -> tuple[Replays, ...]:
    """The replays that a batch of `rows` rows takes: the rule of every worker, and of what is predicted of one.

    One where a bucket holds it: more is a split, into the largest bucket as often as it is filled, then one for the rest.
    """
    largest = buckets[-1]
    full, rest = divmod(rows, largest)
    last = padded_to(rest, buckets) if rest else None
    return (
        *((Replays(largest, largest, full),) if full else ()),
        *((Replays(last, rest, 1),) if last is not None else ()),
    )


class Dispatcher:
    """Runs each program by the first executor that has it: `graph`, then `launch`, then `reference`.

    `reason` says why the first of `executors` is not `graph`, `missing` why a key has no graph. `unbuilt` runs modes that have
    no plan; None where nothing can.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        coverage: CoverageCounter,
        reason: Reason | None,
        missing: Mapping[ProgramKey, Reason],
        unbuilt: Executor | None = None,
    ) -> None:
        self._executors = executors
        self._coverage = coverage
        self._reason = reason
        self._missing = missing
        self._unbuilt = unbuilt

    def run(self, key: ProgramKey, rows: int) -> None:
        """Submit `key` for `rows` live rows and count it. Raises RequestError, counted too, if nothing here can run it."""
        executor = next((e for e in self._executors if e.has(key)), None)
        if executor is None:
            self._run_unbuilt(key, rows)
            return
        executor.run(key)
        if executor.name == "graph":
            self._coverage.replay(key, rows)
        else:
            reason = self._reason or self._missing.get(key, Reason.GRAPH_BUDGET)
            self._coverage.fallback(reason, key.program, key.mode, rows, executor.name)

    def _run_unbuilt(self, key: ProgramKey, rows: int) -> None:
        if self._unbuilt is not None and self._unbuilt.has(key):
            self._unbuilt.run(key)
            self._coverage.fallback(Reason.MODE_NOT_BUILT, key.program, key.mode, rows, self._unbuilt.name)
            return
        self._coverage.fallback(Reason.MODE_NOT_BUILT, key.program, key.mode, rows, "refused")
        raise RequestError(
            f"the artifact has no plan for {key} ({Reason.MODE_NOT_BUILT.value})",
            hint="`ouro-artifact inspect` lists the modes it was built with.",
        )
