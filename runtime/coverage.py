"""What ran by its graph, what did not, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ouro_build.artifacts.columns import PlanIndex
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import CoverageRecord, FallbackCount, GraphSize, KeyCount, MassHistogram, Reason, StepCount


class CoverageCounter:
    """Counts replays by graph key, fallbacks by reason and shape, and decode steps by shape; `graphs` are those declared.

    One thread counts; another may ask for the record meanwhile.
    """

    def __init__(self, graphs: tuple[GraphSize, ...] = ()) -> None:
        self._graphs = graphs
        self._steps: dict[tuple[str, int, int], int] = defaultdict(int)
        self._replays: dict[ProgramKey, list[int]] = defaultdict(lambda: [0, 0])
        self._fallbacks: dict[tuple[Reason, str, str, int, str], int] = defaultdict(int)

    def replay(self, key: ProgramKey, rows: int) -> None:
        """A graph was replayed for `rows` live rows."""
        counts = self._replays[key]
        counts[0] += 1
        counts[1] += rows

    def fallback(self, reason: Reason, program: str, mode: str, rows: int, path: str, count: int = 1) -> None:
        """`rows` rows took `path` instead of one graph, `count` times."""
        self._fallbacks[reason, program, mode, rows, path] += count

    def step(self, mode: str, rows: int, loops: int) -> None:
        """A decode step of `rows` live rows and `loops` loops was submitted."""
        self._steps[mode, rows, loops] += 1

    def add(self, record: CoverageRecord) -> None:
        """Count what `record` counted; graphs that it declares are declared here too."""
        self._graphs = tuple(dict.fromkeys((*self._graphs, *record.graphs)))
        for step in record.steps:
            self._steps[step.mode, step.rows, step.loops] += step.count
        for k in record.keys:
            counts = self._replays[ProgramKey(k.program, k.bucket, k.mode, k.variant)]
            counts[0] += k.replays
            counts[1] += k.live_rows
        for f in record.fallbacks:
            self.fallback(f.reason, f.program, f.mode, f.rows, f.path, f.count)

    def clear(self) -> None:
        """Forget what was counted."""
        self._steps.clear()
        self._replays.clear()
        self._fallbacks.clear()

    def record(self, retained_mass: MassHistogram | None = None) -> CoverageRecord:
        """The counts so far, with what captures retained where that was kept."""
        keys = [
            KeyCount(
                program=key.program,
                bucket=key.bucket,
                mode=key.mode,
                variant=key.variant,
                replays=replays,
                live_rows=live,
                padded_rows=replays * key.bucket - live,
            )
            for key, (replays, live) in sorted(self._replays.copy().items())
        ]
        ordered = sorted(self._fallbacks.copy().items(), key=lambda item: (item[0][0].value, *item[0][1:]))
        fallbacks = [
            FallbackCount(reason=reason, program=program, mode=mode, rows=rows, path=path, count=count)
            for (reason, program, mode, rows, path), count in ordered
        ]
        steps = [
            StepCount(mode=mode, rows=rows, loops=loops, count=count)
            for (mode, rows, loops), count in sorted(self._steps.copy().items())
        ]
        return CoverageRecord(
            keys=tuple(keys),
            fallbacks=tuple(fallbacks),
            steps=tuple(steps),
            graphs=self._graphs,
            retained_mass=retained_mass,
        )


def declared_graphs(index: PlanIndex) -> tuple[GraphSize, ...]:
    """The graphs of `index`, in its order, for a counter."""
    return tuple(
        GraphSize(
            program=graph.key.program,
            bucket=graph.key.bucket,
            mode=graph.key.mode,
            variant=graph.key.variant,
            nodes=sum(index.plans[step.plan].launches * step.times for step in graph.steps),
        )
        for graph in index.graphs
    )


def merged(records: Iterable[CoverageRecord]) -> CoverageRecord:
    """The counts of all `records` together."""
    counter = CoverageCounter()
    for record in records:
        counter.add(record)
    return counter.record()
