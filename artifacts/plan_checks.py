"""What must hold between a target's plan index and the manifest."""

from __future__ import annotations

from ouro_build.artifacts.checks import ALIGNED
from ouro_build.artifacts.columns import SCRATCH_ARGUMENTS, PlanIndex
from ouro_build.artifacts.dtypes import DTYPES, nbytes
from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import Manifest, TargetRecord
from ouro_build.artifacts.plan import Buffer, LoadTimeValue, Pool


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
    for i, buffer in enumerate(index.buffers):
        _check_buffer(buffer, target, f"{where}: buffers[{i}] ({buffer.name})")
    for entry in index.load_time:
        if entry.divisor < 1:
            raise ArtifactError(f"divisor of {entry.name.value} is {entry.divisor}", where=f"{where}: load_time")
    _check_keys(manifest, index, where)


def _check_keys(manifest: Manifest, index: PlanIndex, where: str) -> None:
    keys = [entry.key for entry in index.plans]
    if len(set(keys)) != len(keys):
        raise ArtifactError("two plans have one key", where=f"{where}: plans")
    for key in keys:
        if key.bucket < 1 or key.mode not in manifest.modes:
            raise ArtifactError(f"{key} has no rows, or a mode that the manifest does not list", where=f"{where}: plans")
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
