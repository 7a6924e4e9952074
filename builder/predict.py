"""What a set of buckets would have done with decode steps of known shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ouro_build.artifacts.records import CoverageRecord, Reason, StepCount
from ouro_build.runtime.dispatch import replays_of

Shape = tuple[int, int]
"""Live rows and loops of a decode step."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became, or would become, of `steps` decode steps.

    Replays are those of decode loops; rows are counted once a loop. `split_rows` are the live rows of the `split_steps`, which
    no bucket held.
    """

    steps: int
    split_steps: int
    replays: int
    live_rows: int
    padded_rows: int
    split_rows: int

    @property
    def share(self) -> float:
        """Coverage share: live rows in unsplit replays over all live rows; 0 if there were none."""
        return (self.live_rows - self.split_rows) / self.live_rows if self.live_rows else 0.0

    @property
    def padded_share(self) -> float:
        """Padded rows over all rows of the replays; 0 if there were none."""
        rows = self.live_rows + self.padded_rows
        return self.padded_rows / rows if rows else 0.0

    @property
    def split_share(self) -> float:
        """Split steps over all steps; 0 if there were none."""
        return self.split_steps / self.steps if self.steps else 0.0

    @property
    def replays_a_step(self) -> float:
        """Replays of decode loops over steps; 0 if there were none."""
        return self.replays / self.steps if self.steps else 0.0

    @property
    def wasted_rows(self) -> int:
        """What buckets are chosen to make least: padded rows, and live rows that fell back to a split."""
        return self.padded_rows + self.split_rows


def shapes(steps: Sequence[StepCount]) -> Counter[Shape]:
    """How many steps had each shape, in any mode: a bucket has graphs of every mode."""
    found: Counter[Shape] = Counter()
    for step in steps:
        found[step.rows, step.loops] += step.count
    return found


def predict(steps: Mapping[Shape, int], buckets: Sequence[int]) -> Outcome:
    """The outcome of these steps with graphs for `buckets` (ascending, not empty), by the worker's own rule."""
    total = Counter[str]()
    for (rows, loops), count in steps.items():
        replays = replays_of(rows, buckets)
        times = sum(r.times for r in replays)
        total["steps"] += count
        total["replays"] += times * loops * count
        total["live_rows"] += rows * loops * count
        total["padded_rows"] += sum((r.bucket - r.rows) * r.times for r in replays) * loops * count
        if times > 1:
            total["split_steps"] += count
            total["split_rows"] += rows * loops * count
    return Outcome(**{field: total[field] for field in Outcome.__struct_fields__})


def recorded(record: CoverageRecord) -> Outcome:
    """The outcome that a worker counted as it ran. Steps that took another path than graphs have no replays in it."""
    keys = [k for k in record.keys if k.program == "recurrent"]
    split = [f for f in record.fallbacks if f.program == "recurrent" and f.reason is Reason.BUCKET_MISS]
    largest = record.buckets[-1] if record.buckets else 0
    return Outcome(
        steps=sum(s.count for s in record.steps),
        split_steps=sum(s.count for s in record.steps if s.rows > largest),
        replays=sum(k.replays for k in keys),
        live_rows=sum(k.live_rows for k in keys),
        padded_rows=sum(k.padded_rows for k in keys),
        split_rows=sum(f.rows * f.count for f in split),
    )
