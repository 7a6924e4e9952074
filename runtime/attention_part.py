"""The attention of a loop as plans of their own: what is timed where attention is compared with attention.

They are made from the stored plans of `recurrent`, as data: the same launches, images and arguments, without the launches
that are not attention. So every executor runs them as it runs any plan. Only their queries lie elsewhere: nothing makes them
anew, and in the workspace what a plan does after its last attention, or another plan, would write over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ouro_build.artifacts.columns import Columns, GraphEntry, GraphStep, PlanIndex, decode, encode
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.manifest import TargetRecord
from ouro_build.artifacts.plan import Argument, Buffer, Edge, Launch, Plan, ProgramKey
from ouro_build.artifacts.reader import Artifact

PROGRAM = "attention"
"""The program of the plans made here; mode and bucket are those of the `recurrent` that they are the attention of."""
_NAMES = ("resolve", "attention_", "retained_merge", "route_rows", "split_contexts")
_QUERIES = f"{PROGRAM}:"


def with_attention(index: PlanIndex, columns: Columns) -> tuple[PlanIndex, Columns]:
    """The same plans, and after them one of PROGRAM for every plan of `recurrent`."""
    plans = decode(index, columns)
    logits = next(buffer for buffer in index.buffers if buffer.name == "logits")
    parts = [attention_part(plan, logits) for plan in plans if plan.key.program == "recurrent"]
    queries = dict.fromkeys(b for plan in parts for launch in plan.launches for _, b in launch.buffers() if _moved(b))
    made, numbers = encode((*plans, *parts), (*index.buffers, *queries), index.load_time)
    first = len(plans)
    graphs = tuple(GraphEntry(part.key, (GraphStep(first + i),)) for i, part in enumerate(parts))
    return msgspec.structs.replace(made, graphs=(*index.graphs, *graphs)), numbers


def attention_part(plan: Plan, room: Buffer) -> Plan:
    """What `plan` launches for attention, and before it what finds the rows; what is between these is passed over.

    Queries are what lies in `room`: no plan made here writes there. No loop is entered or left. Raises UsageError if they do
    not fit.
    """
    launches: list[Launch] = []
    ends: list[dict[int, Edge | None]] = []  # by launch of `plan`: where it was put, or what it follows and how
    for launch in plan.launches:
        after = _after(launch, ends)
        if _kept(launch):
            launches.append(_with_queries(launch, room, tuple(after.items())))
        ends.append({len(launches) - 1: None} if _kept(launch) else {**after})
    return Plan(msgspec.structs.replace(plan.key, program=PROGRAM), tuple(launches))


def _after(launch: Launch, ends: Sequence[Mapping[int, Edge | None]]) -> dict[int, Edge]:
    """What `launch` follows, and how: a full edge on any way to it holds for all of that way, and is stricter than others."""
    after: dict[int, Edge] = {}
    for at, edge in launch.after:
        for end, before in ends[at].items():
            full = Edge.FULL in (edge, before, after.get(end))
            after[end] = Edge.FULL if full else edge
    return after


def _kept(launch: Launch) -> bool:
    return launch.specialization.kernel.startswith(_NAMES)


def _with_queries(launch: Launch, room: Buffer, after: tuple[tuple[int, Edge], ...]) -> Launch:
    own = [buffer for name, buffer in launch.buffers() if name == "q"]

    def argument(value: Argument) -> Argument:
        if not isinstance(value, Buffer) or value not in own:
            return value
        if value.bytes > room.bytes:
            what = f"queries need {value.bytes} bytes of {room.name}, which has {room.bytes}"
            raise UsageError(what, where="attention alone", hint="Only whole steps can be timed for a vocabulary this small.")
        return msgspec.structs.replace(value, name=_QUERIES + value.name, pool=room.pool, offset=room.offset)

    return msgspec.structs.replace(launch, arguments=tuple(argument(value) for value in launch.arguments), after=after)


def _moved(buffer: Buffer) -> bool:
    return buffer.name.startswith(_QUERIES)


def queries(index: PlanIndex, bucket: int) -> Buffer:
    """Where the queries of that bucket lie, [bucket, heads, head_dim], for every mode. They outlive all but a `coda`."""
    return next(buffer for buffer in index.buffers if _moved(buffer) and buffer.sizes[0] == bucket)


def attention_key(bucket: int, mode: str) -> ProgramKey:
    """The key of the attention of `recurrent` of that bucket and mode."""
    return ProgramKey(PROGRAM, bucket, mode)


@dataclass(frozen=True)
class AttentionArtifact(Artifact):
    """An artifact with the plans of PROGRAM beside its own."""

    def plans(self, target: TargetRecord) -> tuple[PlanIndex, Columns]:
        """Those that are stored, and those made of them. Raises ArtifactError as `Artifact.plans` does."""
        return with_attention(*super().plans(target))
