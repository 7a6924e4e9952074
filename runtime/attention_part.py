"""The attention of a loop as plans of their own: what is timed where attention is compared with attention.

They are made from the stored plans of `recurrent`, as data: the same launches, images and arguments, without the launches
that are not attention. So every executor runs them as it runs any plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ouro_build.artifacts.columns import Columns, GraphEntry, GraphStep, PlanIndex, decode, encode
from ouro_build.artifacts.manifest import TargetRecord
from ouro_build.artifacts.plan import Edge, Launch, Plan, ProgramKey
from ouro_build.artifacts.reader import Artifact

PROGRAM = "attention"
"""The program of the plans made here; mode and bucket are those of the `recurrent` that they are the attention of."""
_NAMES = ("attention_", "retained_merge", "route_rows", "split_contexts")
_ROWS = "resolve"


def with_attention(index: PlanIndex, columns: Columns) -> tuple[PlanIndex, Columns]:
    """The same plans, and after them one of PROGRAM for every plan of `recurrent`."""
    plans = decode(index, columns)
    parts = [attention_part(plan) for plan in plans if plan.key.program == "recurrent"]
    made, numbers = encode((*plans, *parts), index.buffers, index.load_time)
    first = len(plans)
    graphs = tuple(GraphEntry(part.key, (GraphStep(first + i),)) for i, part in enumerate(parts))
    return msgspec.structs.replace(made, graphs=(*index.graphs, *graphs)), numbers


def attention_part(plan: Plan) -> Plan:
    """What `plan` launches for attention, and before it what finds the rows; each launch follows the one before it.

    Queries are those that the workspace happens to hold. No loop is entered or left.
    """
    kept = [x for x in plan.launches if x.specialization.kernel == _ROWS or x.specialization.kernel.startswith(_NAMES)]
    launches = tuple(msgspec.structs.replace(x, after=_after(x, at)) for at, x in enumerate(kept))
    return Plan(msgspec.structs.replace(plan.key, program=PROGRAM), launches)


def _after(launch: Launch, at: int) -> tuple[tuple[int, Edge], ...]:
    edge = Edge.PROGRAMMATIC if launch.specialization.options.programmatic else Edge.FULL
    return ((at - 1, edge),) if at else ()


def attention_key(bucket: int, mode: str) -> ProgramKey:
    """The key of the attention of `recurrent` of that bucket and mode."""
    return ProgramKey(PROGRAM, bucket, mode)


@dataclass(frozen=True)
class AttentionArtifact(Artifact):
    """An artifact with the plans of PROGRAM beside its own."""

    def plans(self, target: TargetRecord) -> tuple[PlanIndex, Columns]:
        """Those that are stored, and those made of them. Raises ArtifactError as `Artifact.plans` does."""
        return with_attention(*super().plans(target))
