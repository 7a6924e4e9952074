"""What must hold between the fields of a manifest, so that nothing read from it is used out of range."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

from ouro_build.artifacts.digests import chunk_count
from ouro_build.artifacts.dtypes import DTYPES, nbytes
from ouro_build.artifacts.errors import ArtifactError, VersionError
from ouro_build.artifacts.geometry import SPARSE_MODES
from ouro_build.artifacts.manifest import (
    KV_ORDERS,
    MANIFEST,
    WEIGHTS,
    FileRecord,
    Manifest,
    MemoryPlan,
    TargetRecord,
    TensorRecord,
)
from ouro_build.artifacts.packing import LAYOUT
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.retention import retained_counts

ALIGNED = 16
"""Images are compiled for addresses that are multiples of this."""
_PATH = re.compile(r"(?:[A-Za-z0-9_+@-][A-Za-z0-9_.+@-]*/)*[A-Za-z0-9_+@-][A-Za-z0-9_.+@-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}", re.ASCII)
_ARCH = re.compile(r"sm_\d{2,4}", re.ASCII)


def check_manifest(manifest: Manifest) -> None:
    """Raise ArtifactError, naming the field, unless the manifest is consistent in itself.

    VersionError if its weights are packed in another order than this software's.
    """
    _check_numbers(msgspec.to_builtins(manifest), "")
    _check_model(manifest)
    _check_sparse(manifest)
    _check_kv(manifest)
    _check_files(manifest.files)
    _check_weights(manifest)
    paths = {f.path for f in manifest.files}
    names = [t.part.name for t in manifest.targets]
    require(len(names) > 0 and len(set(names)) == len(names), "none, or two for one part", "targets")
    for i, target in enumerate(manifest.targets):
        _check_target(manifest, target, paths, f"targets[{i}]")


def require(good: bool, what: str, field: str) -> None:
    """Raise ArtifactError about `field` of the manifest unless `good`."""
    if not good:
        raise ArtifactError(what, where=f"{MANIFEST}: {field}")


def _check_numbers(value: Any, field: str) -> None:
    """No number in a manifest is negative."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, f"{field}.{name}" if field else name)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _check_numbers(inner, f"{field}[{i}]")
    elif isinstance(value, int):
        require(value >= 0, f"is {value}, zero or more expected", field)


def _check_model(manifest: Manifest) -> None:
    model, geometry = manifest.model, manifest.geometry
    require(model.dtype in DTYPES, f"unknown type {model.dtype!r}", "model.dtype")
    for name in ("rms_norm_eps", "rope_theta"):
        try:
            float.fromhex(getattr(model, name))
        except (ValueError, OverflowError) as error:
            raise ArtifactError("not a hexadecimal float", where=f"{MANIFEST}: model.{name}") from error
    for name in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "loops"):
        require(getattr(model, name) > 0, "is 0", f"model.{name}")
    for name in ("block_size", "max_context", "max_requests"):
        require(getattr(geometry, name) > 0, "is 0", f"geometry.{name}")
    require(len(geometry.buckets) > 0, "is empty", "geometry.buckets")
    for name in ("buckets", "prefill_buckets"):
        sizes = (0, *getattr(geometry, name))
        require(all(a < b for a, b in pairwise(sizes)), "not positive and ascending", f"geometry.{name}")
    require(all(i < model.vocab_size for i in manifest.stop_ids), f"not below {model.vocab_size}", "stop_ids")
    require(len(manifest.modes) > 0 and _unique(manifest.modes), "empty, or one is repeated", "modes")


def _check_sparse(manifest: Manifest) -> None:
    geometry = manifest.geometry
    modes = [mode for mode in SPARSE_MODES if mode in geometry.sparse_modes]
    require(
        list(geometry.sparse_modes) == modes and modes[:1] == ["dense"], "not dense and other modes", "geometry.sparse_modes"
    )
    require(manifest.modes == geometry.sparse_modes, f"not {geometry.sparse_modes}, as the geometry says", "modes")
    require(0 < geometry.key_retention <= 1, f"is {geometry.key_retention}", "geometry.key_retention")
    require(geometry.references == (geometry.reference_slots > 0), "not there, or for nothing", "geometry.reference_slots")
    if geometry.references:
        most = int(retained_counts(geometry.max_context, geometry.key_retention)[-1])
        require(geometry.key_capacity >= most, f"is {geometry.key_capacity}, a row retains {most}", "geometry.key_capacity")


def _check_kv(manifest: Manifest) -> None:
    kv, model = manifest.kv, manifest.model
    require(kv.digest == manifest.kv_digest, f"is {manifest.kv_digest}, the layout's is {kv.digest}", "kv_digest")
    require(kv.dtype in DTYPES, f"unknown type {kv.dtype!r}", "kv.dtype")
    shape = (kv.block_size, kv.kv_heads, kv.head_dim)
    expected = (manifest.geometry.block_size, model.kv_heads, model.head_dim)
    require(shape == expected, f"(block_size, kv_heads, head_dim) is {shape}, {expected} expected", "kv")
    layers = [len(planes) for planes in kv.planes]
    require(layers == [model.layers] * model.loops, f"not {model.loops} loops of {model.layers} layers", "kv.planes")
    # Kernels compute a row's plane, so it cannot be otherwise.
    planes = [plane for loop in kv.planes for plane in loop]
    require(planes == list(range(model.planes)), "not loop * layers + layer", "kv.planes")
    require(kv.axes in KV_ORDERS, f"not {', nor '.join(' '.join(order) for order in KV_ORDERS)}", "kv.axes")


def _check_files(files: tuple[FileRecord, ...]) -> None:
    paths = [f.path for f in files]
    require(all(a < b for a, b in pairwise(paths)), "not sorted by path, or a path is repeated", "files")
    for i, file in enumerate(files):
        _check_file(file, f"files[{i}]")


def _check_file(file: FileRecord, field: str) -> None:
    safe = _PATH.fullmatch(file.path) is not None and file.path != MANIFEST
    require(safe, f"{file.path!r} is not a path inside an artifact", f"{field}.path")
    count = chunk_count(file.bytes)
    require(len(file.chunks) == count, f"{len(file.chunks)} digests, {count} expected", f"{field}.chunks")
    _check_digests((file.sha256, *file.chunks), field)


def _check_digests(digests: Iterable[str], field: str) -> None:
    require(all(_SHA256.fullmatch(d) for d in digests), "a digest is not 64 hexadecimal digits", field)


def _check_weights(manifest: Manifest) -> None:
    weights = manifest.weights
    if weights.layout != LAYOUT:
        raise VersionError(
            f"the weights are packed as {weights.layout!r}, this software reads {LAYOUT!r}",
            where=f"{MANIFEST}: weights.layout",
            hint="Build the artifact again, or use the ouro-build version that made it.",
        )
    _check_file(weights.file, "weights.file")
    require(weights.file.path == WEIGHTS, f"is {weights.file.path!r}, {WEIGHTS!r} expected", "weights.file.path")
    listed = [f for f in manifest.files if f.path == WEIGHTS]
    expected = [weights.file] if weights.embedded else []
    require(listed == expected, f"{WEIGHTS} is listed otherwise than weights.embedded and weights.file say", "files")
    require(_unique(t.name for t in weights.tensors), "a name is repeated", "weights.tensors")
    for i, tensor in enumerate(weights.tensors):
        _check_tensor(tensor, f"weights.tensors[{i}] ({tensor.name})")
    end = 0
    for tensor in sorted(weights.tensors, key=lambda t: t.offset):
        require(tensor.offset >= end, f"{tensor.name} overlaps the tensor before it", "weights.tensors")
        end = tensor.offset + tensor.bytes
    require(end <= weights.bytes, f"tensors end at {end}, the pool at {weights.bytes}", "weights.bytes")


def _check_tensor(tensor: TensorRecord, field: str) -> None:
    require(tensor.dtype in DTYPES, f"unknown type {tensor.dtype!r}", field)
    size = nbytes(tensor.dtype, tensor.shape)
    require(tensor.bytes == size, f"{tensor.bytes} bytes, {size} expected from its shape", field)
    require(tensor.offset % ALIGNED == 0, f"offset {tensor.offset} is no multiple of {ALIGNED}", field)
    _check_digests((tensor.sha256,), field)


def _check_target(manifest: Manifest, target: TargetRecord, paths: set[str], field: str) -> None:
    require(_ARCH.fullmatch(target.part.arch) is not None, f"unknown {target.part.arch!r}", f"{field}.part.arch")
    require(_VERSION.fullmatch(target.ptxas) is not None, f"{target.ptxas!r} is no version", f"{field}.ptxas")
    used = (target.plan_index, target.plan_columns, *(image.path for image in target.images))
    lost = [path for path in used if path not in paths]
    require(not lost, f"{', '.join(lost[:3])} not in files", field)
    for i, image in enumerate(target.images):
        inside = f"{field}.images[{i}]"
        require(image.num_warps > 0, "is 0", f"{inside}.num_warps")
        limit = target.part.shared
        require(image.shared <= limit, f"{image.shared} bytes, the part has {limit}", f"{inside}.shared")
    _check_memory(manifest, target.memory, f"{field}.memory")


def _check_memory(manifest: Manifest, memory: MemoryPlan, field: str) -> None:
    pools = [r.pool for r in memory.pools]
    require(_unique(pools) and Pool.KV not in pools, "a pool is repeated, or is the KV pool", f"{field}.pools")
    weights, needed = memory.pool_bytes(Pool.WEIGHTS), manifest.weights.bytes
    require(weights >= needed, f"the weights pool has {weights} bytes, the weights need {needed}", f"{field}.pools")
    kv = manifest.kv
    block = 2 * manifest.model.planes * nbytes(kv.dtype, (kv.kv_heads, kv.block_size, kv.head_dim))
    found = memory.kv_block_bytes
    require(found == block > 0, f"{found} bytes, {block} expected from the KV layout", f"{field}.kv_block_bytes")
    require(memory.kv_blocks > 0, "is 0", f"{field}.kv_blocks")
    require(memory.total <= memory.budget, f"{memory.total} bytes are over the budget of {memory.budget}", field)


def _unique(values: Iterable[object]) -> bool:
    listed = list(values)
    return len(set(listed)) == len(listed)
