"""Which path a program runs by, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import Reason
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.executor import Executor


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
