"""Proves a finished memory plan right. Knows the plans as they will be stored and nothing of how they were made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.plan import Buffer, Edge, LoadTimeValue, Plan, Pool

ALIGNMENT = 256
GRID_LIMITS = (2**31 - 1, 65535, 65535)
_SHOWN = 20

Parameters = Callable[[str], Collection[str]]
"""Some parameters of a kernel, by its name."""
_Order = NDArray[np.bool_]


def check(
    plans: Sequence[Plan],
    buffers: Sequence[Buffer],
    pools: Mapping[Pool, int],
    writes: Parameters,
    updates: Parameters,
    early: Parameters,
) -> None:
    """Raise BuildError listing every violation; `pools` gives the bytes of each pool of fixed size.

    A kernel may write the parameters `writes`, of which it also reads `updates`, and only reads the others; `early` it may read
    before it waits inside.

    Holds for every plan: its buffers are declared, aligned and inside their pools; `after` names earlier launches only, and
    kernels that may start before those have ended wait inside and read only weights before; launches that touch the same
    buffer, one of them writing, are ordered; workspace is written before it is read and never shared by buffers whose
    lifetimes meet; nothing writes weights; grids are within the limits of every GPU.
    """
    found = [*_declarations(buffers, pools)]
    declared = set(buffers)
    for plan in plans:
        found += (f"{plan.key}: {text}" for text in _plan(plan, declared, writes, updates, early))
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


def _plan(
    plan: Plan, declared: Collection[Buffer], writes: Parameters, updates: Parameters, early: Parameters
) -> Iterator[str]:
    broken = [*_edges(plan), *_early(plan, early), *_grids(plan)]
    if broken:
        yield from broken
        return  # without an order nothing more can be said
    order = _order(plan)
    uses = _uses(plan, writes, updates)
    for buffer, (readers, writers) in uses.items():
        if buffer not in declared:
            yield f"{buffer.name} is used but not declared"
        if buffer.pool is Pool.WEIGHTS and writers:
            yield f"launch {writers[0]} writes {buffer.name} in weights"
        yield from _unordered(buffer, readers, writers, order)
        if buffer.pool is Pool.WORKSPACE:
            yield from _unwritten(buffer, readers, writers, order)
    yield from _shared(uses, order)


def _edges(plan: Plan) -> Iterator[str]:
    for at, launch in enumerate(plan.launches):
        for before, edge in launch.after:
            if not 0 <= before < at:
                yield f"launch {at} waits for launch {before}, which does not come earlier"
            if edge is Edge.PROGRAMMATIC and not launch.specialization.options.programmatic:
                kernel = launch.specialization.kernel
                yield f"launch {at} ({kernel}) may start before launch {before} has ended, and does not wait inside"


def _early(plan: Plan, early: Parameters) -> Iterator[str]:
    for at, launch in enumerate(plan.launches):
        kernel = launch.specialization.kernel
        for name, buffer in launch.buffers():
            if name in early(kernel) and buffer.pool is not Pool.WEIGHTS:
                yield f"launch {at} ({kernel}) may read {buffer.name} before it waits, and {name} is no weight"


def _grids(plan: Plan) -> Iterator[str]:
    for at, launch in enumerate(plan.launches):
        for size, limit in zip(launch.grid, GRID_LIMITS, strict=True):
            if isinstance(size, int) and not 1 <= size <= limit:
                yield f"launch {at} ({launch.specialization.kernel}) has grid {launch.grid}; limits are {GRID_LIMITS}"


def _order(plan: Plan) -> _Order:
    """`order[i, j]`: launch j has finished before launch i reads or writes anything but weights.

    A programmatic edge counts like a full one: a kernel waits inside for its predecessors before it does either.
    """
    count = len(plan.launches)
    order = np.zeros((count, count), np.bool_)
    for at, launch in enumerate(plan.launches):
        for before, _ in launch.after:
            order[at] |= order[before]
            order[at, before] = True
    return order


def _uses(plan: Plan, writes: Parameters, updates: Parameters) -> dict[Buffer, tuple[list[int], list[int]]]:
    """Per buffer the launches that read it and those that write it."""
    uses: dict[Buffer, tuple[list[int], list[int]]] = {}
    for at, launch in enumerate(plan.launches):
        kernel = launch.specialization.kernel
        written, updated = writes(kernel), updates(kernel)
        for name, buffer in launch.buffers():
            readers, writers = uses.setdefault(buffer, ([], []))
            if name in written:
                writers.append(at)
            if name in updated or name not in written:
                readers.append(at)
    return uses


def _unordered(buffer: Buffer, readers: list[int], writers: list[int], order: _Order) -> Iterator[str]:
    """A launch that writes must be ordered against every other launch that touches the buffer."""
    every = sorted({*readers, *writers})
    if not writers or len(every) < 2:
        return
    one_first = order[np.ix_(writers, every)] | order[np.ix_(every, writers)].T
    same = np.equal.outer(writers, every)
    for i, j in np.argwhere(~one_first & ~same):
        yield f"launches {writers[i]} and {every[j]} use {buffer.name} in no order, and {writers[i]} writes it"


def _unwritten(buffer: Buffer, readers: list[int], writers: list[int], order: _Order) -> Iterator[str]:
    for reader in readers:
        if not order[reader, writers].any():
            yield f"launch {reader} reads {buffer.name} before anything wrote it"


def _shared(uses: Mapping[Buffer, tuple[list[int], list[int]]], order: _Order) -> Iterator[str]:
    """Workspace buffers that share bytes: all uses of one must come before all uses of the other."""
    inside = sorted((b for b in uses if b.pool is Pool.WORKSPACE), key=lambda b: b.offset)
    touches = {b: sorted({*uses[b][0], *uses[b][1]}) for b in inside}
    for at, a in enumerate(inside):
        for b in inside[at + 1 :]:
            if b.offset >= a.offset + a.bytes:
                break
            earlier = order[np.ix_(touches[b], touches[a])].all()
            later = order[np.ix_(touches[a], touches[b])].all()
            if not earlier and not later:
                yield f"{a.name} and {b.name} overlap and are live at the same time"
