"""Gives every buffer its place. Workspace buffers of one plan share space when their lifetimes do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ouro_build.artifacts.plan import Buffer, Launch, Plan, Pool
from ouro_build.builder.buffers import Buffers
from ouro_build.runtime.memory import ALIGNMENT


@dataclass(frozen=True)
class Placement:
    """Plans whose buffers are placed, every buffer that they or the host use, and the bytes of the pools of fixed size."""

    plans: tuple[Plan, ...]
    buffers: tuple[Buffer, ...]
    pools: dict[Pool, int]


def place(plans: Sequence[Plan], buffers: Buffers) -> Placement:
    """Place what `buffers` and `plans` leave open; the weights' places are the packing's.

    State and io buffers lie one after another in the order of `persistent`, each at a multiple of ALIGNMENT; the KV
    buffer fills its pool, whose size is known at load. The workspace is as large as the hungriest plan needs.
    """
    fixed: dict[Buffer, Buffer] = {}
    pools = dict.fromkeys(Pool, 0)
    for buffer in persistent(buffers):
        fixed[buffer] = msgspec.structs.replace(buffer, offset=pools[buffer.pool])
        pools[buffer.pool] += align(buffer.bytes)
    weights = tuple(dict.fromkeys((*buffers.weights.values(), buffers.weights_pool)))
    pools[Pool.WEIGHTS] = buffers.weights_pool.bytes
    del pools[Pool.KV]
    placed, every = [], [*weights, *fixed.values()]
    for plan in plans:
        places = {b: msgspec.structs.replace(b, offset=at) for b, at in workspace(plan).items()}
        pools[Pool.WORKSPACE] = max(pools[Pool.WORKSPACE], *(align(b.offset + b.bytes) for b in places.values()), 0)
        every += places.values()
        placed.append(_with(plan, fixed | places))
    return Placement(tuple(placed), tuple(every), pools)


def persistent(buffers: Buffers) -> tuple[Buffer, ...]:
    """Buffers that outlive a program, apart from the weights, in the order in which they lie in their pools.

    The host's inputs come first in the io pool, one after another: it copies them as one piece.
    """
    b = buffers
    state = (b.row_state, b.hidden, b.gate_logits, b.exit_probability, b.block_tables)
    r = b.references
    remembered = () if r is None else (r.retained_counts, r.records, r.mass, r.keys, r.output, r.contribution)
    return (b.kv, *state, *remembered, b.coda_batch, b.batch, b.inputs, b.logits, b.tokens, b.read_sums)


def workspace(plan: Plan) -> dict[Buffer, int]:
    """Offsets in bytes of the plan's workspace buffers: the largest first, each into the tightest gap that fits."""
    uses = _uses(plan)
    ordered = _Order(plan, uses)
    places: dict[Buffer, int] = {}
    for buffer in sorted(uses, key=lambda b: -b.bytes):  # equal ones in order of first use
        taken = sorted((at, at + align(b.bytes)) for b, at in places.items() if not ordered.apart(buffer, b))
        places[buffer] = _best_gap(taken, align(buffer.bytes))
    return {buffer: places[buffer] for buffer in uses}


def align(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _uses(plan: Plan) -> dict[Buffer, int]:
    """The launches that use each workspace buffer, as bits of an integer."""
    uses: dict[Buffer, int] = {}
    for at, launch in enumerate(plan.launches):
        for _, buffer in launch.buffers():
            if buffer.pool is Pool.WORKSPACE:
                uses[buffer] = uses.get(buffer, 0) | 1 << at
    return uses


class _Order:
    """Which buffers a plan has finished with before it first touches another."""

    def __init__(self, plan: Plan, uses: dict[Buffer, int]) -> None:
        earlier: list[int] = []  # launches that have finished when launch i starts to write
        for launch in plan.launches:
            bits = 0
            for before, _ in launch.after:
                bits |= earlier[before] | 1 << before
            earlier.append(bits)
        self._uses = uses
        self._before = {b: _common(earlier, bits) for b, bits in uses.items()}

    def apart(self, a: Buffer, b: Buffer) -> bool:
        """Whether every use of one comes before every use of the other."""
        uses, before = self._uses, self._before
        return not uses[a] & ~before[b] or not uses[b] & ~before[a]


def _common(earlier: list[int], uses: int) -> int:
    """Launches that come before every launch of `uses`."""
    bits = -1
    for at, before in enumerate(earlier):
        if uses >> at & 1:
            bits &= before
    return bits


def _best_gap(taken: list[tuple[int, int]], size: int) -> int:
    """Where `size` bytes fit between the sorted ranges `taken` with the least left over; after them all if nowhere."""
    best, slack, end = -1, -1, 0
    for start, stop in taken:
        left = start - end - size
        if left >= 0 and (best < 0 or left < slack):
            best, slack = end, left
        end = max(end, stop)
    return end if best < 0 else best


def _with(plan: Plan, places: dict[Buffer, Buffer]) -> Plan:
    def launch(x: Launch) -> Launch:
        return msgspec.structs.replace(
            x, arguments=tuple(places.get(a, a) if isinstance(a, Buffer) else a for a in x.arguments)
        )

    return Plan(plan.key, tuple(launch(x) for x in plan.launches))
