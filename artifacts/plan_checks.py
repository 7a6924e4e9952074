"""What must hold between a target's plans and the manifest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.checks import ALIGNED
from ouro_build.artifacts.columns import (
    CONSTANT,
    FIRST_POOL,
    LOAD_TIME,
    SCRATCH_ARGUMENTS,
    Columns,
    GraphStep,
    PlanIndex,
)
from ouro_build.artifacts.dtypes import DTYPES, nbytes
from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import Manifest, TargetRecord
from ouro_build.artifacts.plan import Buffer, Edge, LoadTimeValue, Pool, ProgramKey

_WIDTHS = {"fp32": 4, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
"""Bytes of an argument that is no pointer, by type. The two scratch pointers have type "" here, and are null."""
MAX_TIMES = 1 << 16
"""Runs that one step of a graph may ask for."""
_POINTERS = frozenset("*" + dtype.triton for dtype in DTYPES.values())


def check_plans(manifest: Manifest, target: TargetRecord, index: PlanIndex) -> None:
    """Raise ArtifactError unless every specialisation has its image and every buffer lies in its pool."""
    where = target.plan_index
    if len(index.specializations) != len(target.images):
        what = f"{len(index.specializations)} specialisations, the manifest has {len(target.images)} images"
        raise ArtifactError(what, where=f"{where}: specializations")
    for i, (specialization, image) in enumerate(zip(index.specializations, target.images, strict=True)):
        wanted = len(specialization.types) + SCRATCH_ARGUMENTS
        if len(image.parameters) != wanted:
            what = f"{specialization.kernel} takes {wanted} parameters, image {image.path} {len(image.parameters)}"
            raise ArtifactError(what, where=f"{where}: specializations[{i}]")
        carveout = specialization.options.carveout
        if not -1 <= carveout <= 100:
            what = f"the carve-out is {carveout}, a percentage or -1 expected"
            raise ArtifactError(what, where=f"{where}: specializations[{i}]")
        if not 0 <= specialization.options.shared <= target.part.shared:
            what = f"a block's shared memory is {specialization.options.shared} bytes, 0 … {target.part.shared} expected"
            raise ArtifactError(what, where=f"{where}: specializations[{i}]")
    for i, buffer in enumerate(index.buffers):
        at = f"{where}: buffers[{i}] ({buffer.name})"
        _check_buffer(buffer, target, at)
        if buffer.pool is Pool.KV and (buffer.dtype, buffer.shape) != (manifest.kv.dtype, manifest.kv.shape):
            raise ArtifactError("its type or its shape is not that of the manifest's kv", where=at)
    for entry in index.load_time:
        if entry.divisor < 1:
            raise ArtifactError(f"divisor of {entry.name.value} is {entry.divisor}", where=f"{where}: load_time")
    _check_keys(manifest, index, where)


def check_arguments(index: PlanIndex, columns: Columns, where: str) -> None:
    """Raise ArtifactError unless every argument of `columns`, which are in range, has the type its parameter declares."""
    scratch = ("",) * SCRATCH_ARGUMENTS
    types = [(*(kind for _, kind in s.types), *scratch) for s in index.specializations]
    names = tuple(dict.fromkeys(name for declared in types for name in declared))
    unknown = [n for n in names if n and n not in _WIDTHS and n not in _POINTERS]
    if unknown:
        raise ArtifactError(f"unknown argument type {unknown[0]!r}", where=where)
    declared = _declared(types, names, columns)
    kinds, slots = columns.kinds, columns.slots
    buffers = np.array([names.index(b.pointer_type) if b.pointer_type in names else -1 for b in index.buffers] or [-1])
    pointer = kinds >= FIRST_POOL
    right = np.where(pointer, buffers[np.where(pointer, columns.buffers, 0)] == declared, False)
    wide = np.array([name == "i64" for name in names] or [False])
    right |= (kinds == LOAD_TIME) & wide[declared]
    limits = np.array([(1 << 8 * _WIDTHS.get(name, 0)) - 1 for name in names] or [0], np.uint64)
    constant = np.array([name in _WIDTHS or not name for name in names] or [False])
    right |= (kinds == CONSTANT) & constant[declared] & (slots <= limits[declared])
    if not right.all():
        at = int(np.flatnonzero(~right)[0])
        raise ArtifactError(f"argument {at} is not of its parameter's type {names[declared[at]]!r}", where=where)


def check_graphs(index: PlanIndex, columns: Columns, where: str) -> None:
    """Raise ArtifactError unless every graph of `index` runs plans that there are, joined as they can be.

    A programmatic edge needs a launch that waits inside, a programmatic join a plan all of whose first launches do.
    """
    _check_edges(index, columns, where)
    plans = {entry.key: i for i, entry in enumerate(index.plans)}
    seen: set[ProgramKey] = set()
    for i, graph in enumerate(index.graphs):
        at = f"{where}: graphs[{i}] ({graph.key})"
        if graph.key in seen:
            raise ArtifactError("two graphs have one key", where=at)
        seen.add(graph.key)
        if not graph.steps:
            raise ArtifactError("it has no steps", where=at)
        for step in graph.steps:
            _check_step(index, columns, step, at)
        if graph.key in plans and [(s.plan, s.times) for s in graph.steps] != [(plans[graph.key], 1)]:
            raise ArtifactError("it has the key of a plan, and is not that plan once", where=at)


def _check_edges(index: PlanIndex, columns: Columns, where: str) -> None:
    launches, edges = columns.launches, columns.dependencies["edge"]
    waits = np.array([s.options.programmatic for s in index.specializations] or [False])
    owners = np.repeat(np.arange(len(launches)), launches["dependencies"])
    bad = owners[(edges == Edge.PROGRAMMATIC) & ~waits[launches["specialization"][owners]]]
    if len(bad):
        kernel = index.specializations[int(launches["specialization"][bad[0]])].kernel
        what = f"launch {int(bad[0])} ({kernel}) may start before another has ended, and does not wait inside"
        raise ArtifactError(what, where=where)


def _check_step(index: PlanIndex, columns: Columns, step: GraphStep, where: str) -> None:
    if not 0 <= step.plan < len(index.plans):
        raise ArtifactError(f"it runs plan {step.plan} of {len(index.plans)}", where=where)
    if not 1 <= step.times <= MAX_TIMES:
        raise ArtifactError(f"it runs a plan {step.times} times, 1 … {MAX_TIMES} are allowed", where=where)
    if step.join == Edge.PROGRAMMATIC:
        entry = index.plans[step.plan]
        launches = columns.launches[entry.first : entry.first + entry.launches]
        first = launches["specialization"][launches["dependencies"] == 0]
        if not all(index.specializations[i].options.programmatic for i in first.tolist()):
            what = f"{entry.key} is joined programmatically, and its first launch does not wait for what is before it"
            raise ArtifactError(what, where=where)


def _declared(types: list[tuple[str, ...]], names: tuple[str, ...], columns: Columns) -> NDArray[np.int64]:
    """For every argument of `columns` the place in `names` of the type that its parameter declares."""
    flat = np.array([names.index(name) for declared in types for name in declared], np.int64)
    firsts = np.cumsum([0, *(len(declared) for declared in types)])
    launches = columns.launches
    start = firsts[launches["specialization"]] - launches["first_argument"]
    places: NDArray[np.int64] = flat[np.repeat(start, launches["arguments"]) + np.arange(len(columns.slots))]
    return places


def _check_keys(manifest: Manifest, index: PlanIndex, where: str) -> None:
    keys = [entry.key for entry in index.plans]
    if len(set(keys)) != len(keys):
        raise ArtifactError("two plans have one key", where=f"{where}: plans")
    for field, entries in (("plans", index.plans), ("graphs", index.graphs)):
        for key in (entry.key for entry in entries):
            if key.bucket < 1 or key.mode not in manifest.modes:
                raise ArtifactError(f"{key} has no rows, or a mode that the manifest does not list", where=f"{where}: {field}")
    if any(entry.launches < 0 for entry in index.plans) or min(index.launches, index.arguments, index.dependencies) < 0:
        raise ArtifactError("a count is negative", where=f"{where}: plans")


def _check_buffer(buffer: Buffer, target: TargetRecord, where: str) -> None:
    if buffer.dtype not in DTYPES:
        raise ArtifactError(f"unknown type {buffer.dtype!r}", where=where)
    if buffer.offset < 0 or buffer.offset % ALIGNED:
        raise ArtifactError(f"offset {buffer.offset} is not a multiple of {ALIGNED}", where=where)
    shape = _planned_shape(buffer, target, where)
    end, size = buffer.offset + nbytes(buffer.dtype, shape), target.memory.pool_bytes(buffer.pool)
    if min(shape, default=1) < 1 or end > size:
        pool = buffer.pool.name.lower()
        raise ArtifactError(f"shape {shape} ends at byte {end}, the pool {pool} at {size}", where=where)


def _planned_shape(buffer: Buffer, target: TargetRecord, where: str) -> tuple[int, ...]:
    """Its shape with the planned number of KV blocks; only the KV pool has that dimension, since only it may be resized."""
    sizes = []
    for dim in buffer.shape:
        if isinstance(dim, LoadTimeValue):
            if dim is not LoadTimeValue.KV_BLOCKS or buffer.pool is not Pool.KV:
                raise ArtifactError(f"{dim.value} is no dimension of a buffer in {buffer.pool.name.lower()}", where=where)
            dim = target.memory.kv_blocks
        sizes.append(dim)
    return tuple(sizes)
