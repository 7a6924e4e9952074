"""Proves a finished memory plan right. Knows the plans as they will be stored and nothing of how they were made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.plan import Buffer, Edge, Launch, LoadTimeValue, Plan, Pool
from ouro_build.kernels.spec import Kernel

ALIGNMENT = 256
GRID_LIMITS = (2**31 - 1, 65535, 65535)
_SHOWN = 20

Kernels = Callable[[str], Kernel]
"""The declaration of a kernel, by its name."""
_Order = NDArray[np.bool_]
_ANY_LAYER = -1


@dataclass
class _Use:
    """Launches that read a buffer, those that write it, and of each the one layer of it that it touches, or `_ANY_LAYER`."""

    readers: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    layers: dict[int, int] = field(default_factory=dict)

    @property
    def launches(self) -> list[int]:
        return sorted(self.layers)

    def apart(self, one: int, other: int) -> bool:
        """Whether two launches touch it at two layers, both known."""
        return _ANY_LAYER not in (self.layers[one], self.layers[other]) and self.layers[one] != self.layers[other]


def check(
    plans: Sequence[Plan],
    buffers: Sequence[Buffer],
    pools: Mapping[Pool, int],
    kernels: Kernels,
) -> None:
    """Raise BuildError listing every violation; `pools` gives the bytes of each pool of fixed size.

    What a kernel may do with its parameters is what `kernels` declares of it.

    Holds for every plan: its buffers are declared, aligned and inside their pools; `after` names earlier launches only, and
    kernels that may start before those have ended wait inside, and before that read only weights, what was written by launches
    that had ended when they started, and of what they declare as `settled` what they must leave to tests; launches that touch
    the same buffer, one of them writing, are ordered, unless each touches one layer of it, a number in the plan, and these
    differ; workspace is written before it is read and never shared by buffers whose lifetimes meet; nothing writes weights;
    grids are within the limits of every GPU.
    """
    found = [*_declarations(buffers, pools)]
    declared = set(buffers)
    for plan in plans:
        found += (f"{plan.key}: {text}" for text in _plan(plan, declared, kernels))
    if found:
        shown = "\n".join(found[:_SHOWN]) + (f"\n… and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise BuildError(
            f"{len(found)} violations:\n{shown}", where="memory plan", hint="This is a defect of ouro-build: please report it."
        )


def _declarations(buffers: Sequence[Buffer], pools: Mapping[Pool, int]) -> Iterator[str]:
    """Every buffer lies inside its pool; those of pools that outlive programs lie apart.

    A buffer that is all of the weights pool overlaps every other there: nothing writes them.
    """
    for buffer in buffers:
        yield from _bounds(buffer, pools)
    for pool in (Pool.WEIGHTS, Pool.KV, Pool.REFERENCES, Pool.STATE, Pool.IO):
        whole = pools.get(pool, 0) if pool is Pool.WEIGHTS else -1
        inside = sorted((b for b in buffers if b.pool is pool and b.bytes != whole), key=lambda b: (b.offset, b.bytes))
        for a, b in pairwise(inside):
            if b.offset < a.offset + a.bytes or _fills(a) or _fills(b):
                yield f"{a.name} and {b.name} overlap in {pool.name.lower()}"


def _bounds(buffer: Buffer, pools: Mapping[Pool, int]) -> Iterator[str]:
    if buffer.offset < 0 or buffer.offset % ALIGNMENT:
        yield f"{buffer.name} is at {buffer.offset}, no multiple of {ALIGNMENT}"
    if _fills(buffer):
        if buffer.offset != 0 or buffer.pool in pools:
            yield f"{buffer.name} has a load-time size and does not have a pool of such a size to itself"
    elif buffer.offset + buffer.bytes > pools.get(buffer.pool, 0):
        end, size = buffer.offset + buffer.bytes, pools.get(buffer.pool, 0)
        yield f"{buffer.name} ends at {end}, outside {buffer.pool.name.lower()} of {size} bytes"


def _fills(buffer: Buffer) -> bool:
    return any(isinstance(size, LoadTimeValue) for size in buffer.shape)


def _plan(plan: Plan, declared: Collection[Buffer], kernels: Kernels) -> Iterator[str]:
    broken = [*_edges(plan), *_grids(plan)]
    if broken:
        yield from broken
        return  # without an order nothing more can be said
    order = _order(plan)
    uses = _uses(plan, kernels)
    yield from _early(plan, kernels, uses, order)
    for buffer, use in uses.items():
        if buffer not in declared:
            yield f"{buffer.name} is used but not declared"
        if buffer.pool is Pool.WEIGHTS and use.writers:
            yield f"launch {use.writers[0]} writes {buffer.name} in weights"
        yield from _unordered(buffer, use, order)
        if buffer.pool is Pool.WORKSPACE:
            yield from _unwritten(buffer, use, order)
    yield from _shared(uses, order)


def _edges(plan: Plan) -> Iterator[str]:
    for at, launch in enumerate(plan.launches):
        for before, edge in launch.after:
            if not 0 <= before < at:
                yield f"launch {at} waits for launch {before}, which does not come earlier"
            if edge is Edge.PROGRAMMATIC and not launch.specialization.options.programmatic:
                kernel = launch.specialization.kernel
                yield f"launch {at} ({kernel}) may start before launch {before} has ended, and does not wait inside"


def _early(plan: Plan, kernels: Kernels, uses: Mapping[Buffer, _Use], order: _Order) -> Iterator[str]:
    """What a launch may read before it waits is in weights, or what wrote it had ended before the launch could start."""
    ended = _ended(plan, order)
    for at, launch in enumerate(plan.launches):
        kernel = kernels(launch.specialization.kernel)
        for name, buffer in launch.buffers():
            says = f"launch {at} ({kernel.name}) may read {buffer.name} before it waits, and"
            if name in kernel.weights and buffer.pool is not Pool.WEIGHTS:
                yield f"{says} {name} is no weight"
            if name not in kernel.early:
                continue
            if not ended[at].any():
                yield f"{says} programs before this one may still write it"
            elif name not in kernel.settled:
                use = uses[buffer]
                writing = [w for w in use.writers if not (ended[at, w] or order[w, at] or use.apart(at, w))]
                yield from (f"{says} launch {w} may still write it" for w in writing)


def _grids(plan: Plan) -> Iterator[str]:
    for at, launch in enumerate(plan.launches):
        for size, limit in zip(launch.grid, GRID_LIMITS, strict=True):
            if isinstance(size, int) and not 1 <= size <= limit:
                yield f"launch {at} ({launch.specialization.kernel}) has grid {launch.grid}; limits are {GRID_LIMITS}"


def _order(plan: Plan) -> _Order:
    """`order[i, j]`: launch j has finished before launch i writes, or reads what it may not read early.

    A programmatic edge counts like a full one: a kernel waits inside for its predecessors before it does either.
    """
    count = len(plan.launches)
    order = np.zeros((count, count), np.bool_)
    for at, launch in enumerate(plan.launches):
        for before, _ in launch.after:
            order[at] |= order[before]
            order[at, before] = True
    return order


def _ended(plan: Plan, order: _Order) -> _Order:
    """`ended[i, j]`: launch j has finished before launch i starts, and so has every program before the plan's if any j has.

    A launch starts when those that it follows by programmatic edges have started, and the others have ended.
    """
    ended = np.zeros_like(order)
    for at, launch in enumerate(plan.launches):
        for before, edge in launch.after:
            ended[at] |= ended[before] if edge is Edge.PROGRAMMATIC else order[before]
            ended[at, before] |= edge is not Edge.PROGRAMMATIC
    return ended


def _uses(plan: Plan, kernels: Kernels) -> dict[Buffer, _Use]:
    """Per buffer the launches that touch it."""
    uses: dict[Buffer, _Use] = {}
    for at, launch in enumerate(plan.launches):
        kernel = kernels(launch.specialization.kernel)
        layer = _layer(launch) if kernel.layered else _ANY_LAYER
        for name, buffer in launch.buffers():
            use = uses.setdefault(buffer, _Use())
            if name in kernel.writes:
                use.writers.append(at)
            if name in kernel.updates or name not in kernel.writes:
                use.readers.append(at)
            touched = layer if name in kernel.layered else _ANY_LAYER
            # One launch may be given a buffer twice: all of it is touched if either parameter says so.
            use.layers[at] = min(touched, use.layers.get(at, touched))
    return uses


def _layer(launch: Launch) -> int:
    """The layer that its argument `layer` names, if the plan knows it."""
    layer = launch.named().get("layer")
    return layer if isinstance(layer, int) and layer >= 0 else _ANY_LAYER


def _unordered(buffer: Buffer, use: _Use, order: _Order) -> Iterator[str]:
    """A launch that writes must be ordered against every other launch that touches the buffer, but at another layer of it."""
    writers, every = use.writers, use.launches
    if not writers or len(every) < 2:
        return
    one_first = order[np.ix_(writers, every)] | order[np.ix_(every, writers)].T
    same = np.equal.outer(writers, every)
    for i, j in np.argwhere(~one_first & ~same):
        one, other = writers[i], every[j]
        if not use.apart(one, other):
            yield f"launches {one} and {other} use {buffer.name} in no order, and {one} writes it"


def _unwritten(buffer: Buffer, use: _Use, order: _Order) -> Iterator[str]:
    for reader in use.readers:
        if not order[reader, use.writers].any():
            yield f"launch {reader} reads {buffer.name} before anything wrote it"


def _shared(uses: Mapping[Buffer, _Use], order: _Order) -> Iterator[str]:
    """Workspace buffers that share bytes: all uses of one must come before all uses of the other, at whatever layers."""
    inside = sorted((b for b in uses if b.pool is Pool.WORKSPACE), key=lambda b: b.offset)
    touches = {b: uses[b].launches for b in inside}
    for at, a in enumerate(inside):
        for b in inside[at + 1 :]:
            if b.offset >= a.offset + a.bytes:
                break
            earlier = order[np.ix_(touches[b], touches[a])].all()
            later = order[np.ix_(touches[a], touches[b])].all()
            if not earlier and not later:
                yield f"{a.name} and {b.name} overlap and are live at the same time"
