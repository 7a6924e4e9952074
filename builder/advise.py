"""Which buckets to build for the load that a coverage record saw."""

from __future__ import annotations

import msgspec
from rich.console import RenderableType

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.records import CoverageRecord, GraphSize
from ouro_build.builder.budget import NODE_BYTES, size
from ouro_build.builder.choose_buckets import choose_buckets
from ouro_build.builder.output import facts, stack, table
from ouro_build.builder.predict import Outcome, predict, recorded, shapes
from ouro_build.builder.spec import MAX_BUCKET, MAX_REQUESTS

DECODE_PROGRAMS = ("prelude", "recurrent", "coda", "sample", "kv_copy", "advance")
"""What every decode bucket has graphs of."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Buckets for a load, and what they change.

    `graphs_a_bucket` graphs of about `bytes_a_bucket` device bytes are taken to be built for each bucket; the budget allowed
    `allowed` buckets. `max_requests` is the most rows a step had, as far as a build takes so many: more than
    the largest bucket if it is best to split those.
    `recorded` is what the worker counted, `before` what is predicted for the buckets that it had, `after` for `buckets`.
    """

    had: tuple[int, ...]
    buckets: tuple[int, ...]
    allowed: int
    graphs_a_bucket: int
    bytes_a_bucket: int
    max_requests: int
    recorded: Outcome
    before: Outcome
    after: Outcome

    @property
    def flags(self) -> str:
        """What to give `ouro-build`."""
        flags = "--buckets " + ",".join(map(str, self.buckets))
        return flags + (f" --max-requests {self.max_requests}" if self.max_requests > self.buckets[-1] else "")


def advise(record: CoverageRecord, max_graphs: int | None = None, memory: int | None = None) -> Advice:
    """The best buckets for the steps of `record`, within `max_graphs` graphs and `memory` bytes of graphs.

    Without either, as many buckets as there were. Raises UsageError for a record with no steps or no graphs, and for a
    budget that has no room for one bucket.
    """
    if not record.buckets:
        raise UsageError(
            "no graph of a decode loop is declared", where="graphs", hint="Take the record of a worker: --coverage-out."
        )
    graphs, nodes = _bucket_cost(record.graphs)
    allowed = _allowed(len(record.buckets), graphs, nodes * NODE_BYTES, max_graphs, memory)
    steps = shapes(record.steps)
    buckets = choose_buckets(steps, allowed, MAX_BUCKET)
    return Advice(
        had=record.buckets,
        buckets=buckets,
        allowed=allowed,
        graphs_a_bucket=graphs,
        bytes_a_bucket=nodes * NODE_BYTES,
        max_requests=min(MAX_REQUESTS, max(rows for rows, _ in steps)),
        recorded=recorded(record),
        before=predict(steps, record.buckets),
        after=predict(steps, buckets),
    )


def _bucket_cost(graphs: tuple[GraphSize, ...]) -> tuple[int, int]:
    """Graphs and nodes of one decode bucket; of buckets that differ, the most nodes of each graph."""
    nodes: dict[tuple[str, str, str], int] = {}
    for g in graphs:
        if g.program in DECODE_PROGRAMS:
            name = (g.program, g.mode, g.variant)
            nodes[name] = max(nodes.get(name, 0), g.nodes)
    return len(nodes), sum(nodes.values())


def _allowed(had: int, graphs: int, bytes_: int, max_graphs: int | None, memory: int | None) -> int:
    if max_graphs is None and memory is None:
        return had
    rooms = [MAX_BUCKET]
    if max_graphs is not None:
        rooms.append(max_graphs // graphs)
    if memory is not None:
        rooms.append(memory // max(bytes_, 1))
    if min(rooms) < 1:
        raise UsageError(
            f"no room for one bucket, which takes {graphs} graphs of about {size(bytes_)} together",
            where="--max-graphs" if max_graphs is not None and max_graphs < graphs else "--memory",
        )
    return min(rooms)


class AdviceView(msgspec.Struct, frozen=True, kw_only=True):
    """What `ouro-artifact advise --json` prints: the advice, its flags, and the shares worked out."""

    flags: str
    advice: Advice
    recorded: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]


def view(advice: Advice) -> AdviceView:
    """The advice for tools."""
    return AdviceView(
        flags=advice.flags,
        advice=advice,
        recorded=_shares(advice.recorded),
        before=_shares(advice.before),
        after=_shares(advice.after),
    )


def draw(shown: AdviceView) -> RenderableType:
    """The advice for people; the last line is ready to be pasted."""
    a = shown.advice
    budget = f"{a.allowed} buckets of {a.graphs_a_bucket} graphs, about {size(a.bytes_a_bucket)} each"
    about = [("steps recorded", a.before.steps), ("buckets then", a.had), ("room for", budget), ("buckets advised", a.buckets)]
    rows = [
        ("coverage share", *(f"{s['share']:.2%}" for s in (shown.recorded, shown.before, shown.after))),
        ("padded share", *(f"{s['padded_share']:.2%}" for s in (shown.recorded, shown.before, shown.after))),
        ("split steps", *(f"{o.split_steps:,} ({o.split_share:.2%})" for o in (a.recorded, a.before, a.after))),
        ("replays a step", *(f"{o.replays_a_step:.3f}" for o in (a.recorded, a.before, a.after))),
        ("padded rows", *(f"{o.padded_rows:,}" for o in (a.recorded, a.before, a.after))),
        ("rows in split steps", *(f"{o.split_rows:,}" for o in (a.recorded, a.before, a.after))),
    ]
    columns = ("of decode loops", "recorded", "predicted, buckets then", "predicted, buckets advised")
    return stack(facts("advice", about), table("decode steps", columns, rows), shown.flags)


def _shares(outcome: Outcome) -> dict[str, float]:
    names = ("share", "padded_share", "split_share", "replays_a_step")
    return {name: round(getattr(outcome, name), 6) for name in names}
