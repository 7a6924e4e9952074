"""The manifest: what an artifact is, and the digest of every byte in it.

Stored as canonical JSON (sorted keys, compact, ASCII): `encode_manifest(decode_manifest(raw)) == raw` is required, so
duplicate keys, unknown fields and other spellings of a value are refused. A seal, the sha256 of the manifest without it,
makes damage to any other byte visible. The artifact's identity is the sha256 of the file.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

import msgspec

from ouro_build.artifacts.chunks import CHUNK as CHUNK
from ouro_build.artifacts.chunks import CHUNKED_ABOVE as CHUNKED_ABOVE
from ouro_build.artifacts.chunks import WEIGHTS as WEIGHTS
from ouro_build.artifacts.errors import ArtifactError, VersionError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Dim, LoadTimeValue, Pool
from ouro_build.artifacts.tuning import TuningRecord

FORMAT = "1.2"
"""1.1 added the carve-outs that launches prefer, 1.2 the shared memory that they ask for."""
MANIFEST = "manifest.json"
ORACLE = "oracle.json"
KV_AXES = ("plane", "block", "key_value", "kv_head", "position", "head_dim")
"""The order of the KV pool that builds write: a plane's blocks are adjacent."""
KV_ORDERS = (KV_AXES, ("block", "plane", *KV_AXES[2:]))
"""The orders that format 1.0 knows; in the second a block's planes are adjacent. Kernels take the strides at load."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything in a manifest."""


class FileRecord(_Record, frozen=True, kw_only=True):
    """A file of the artifact: `path` relative with forward slashes, its size and digests (`chunks`: one a `CHUNK`)."""

    path: str
    bytes: int
    sha256: str
    chunks: tuple[str, ...] = ()


class TensorRecord(_Record, frozen=True, kw_only=True):
    """A packed tensor: its shape as stored, `offset` in the weights pool, the checkpoint tensors it was made of, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sha256: str
    sources: tuple[str, ...]


class WeightsRecord(_Record, frozen=True, kw_only=True):
    """The packed weights. `bytes` is the size of the pool; `file` what an embedded weights file is, present or not."""

    embedded: bool
    layout: str
    bytes: int
    tensors: tuple[TensorRecord, ...]
    file: FileRecord


class SourceRecord(_Record, frozen=True, kw_only=True):
    """Where the weights came from. `name` is a hub id or preset; a local checkpoint has none, its folder is no identity."""

    kind: Literal["checkpoint", "hub", "preset"]
    name: str
    synthetic: bool
    seed: int


class KvLayout(_Record, frozen=True, kw_only=True):
    """How keys and values lie in memory. Two workers that exchange KV must agree on it.

    `axes` from outermost to innermost, one of KV_ORDERS. `planes[loop][layer]` is the plane that a query of that loop and
    layer sees. Kernels of format 1.0 do not read this table, they compute loop * layers + layer: readers refuse any other.
    """

    axes: tuple[str, ...]
    planes: tuple[tuple[int, ...], ...]
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def block_elements(self) -> int:
        """Elements of one block in one plane: keys, then values, each [kv_heads, block_size, head_dim]."""
        return 2 * self.kv_heads * self.block_size * self.head_dim

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Shape of the pool as one buffer, in the order of `axes`."""
        sizes: dict[str, Dim] = {
            "plane": sum(map(len, self.planes)),
            "block": LoadTimeValue.KV_BLOCKS,
            "key_value": 2,
            "kv_head": self.kv_heads,
            "position": self.block_size,
            "head_dim": self.head_dim,
        }
        return tuple(sizes[axis] for axis in self.axes)

    @property
    def digest(self) -> str:
        """sha256 of the canonical form."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class ImageRecord(_Record, frozen=True, kw_only=True):
    """A compiled kernel. Bytes are per block (`shared`) and per thread (`spills`); `parameters` are (offset, size)."""

    path: str
    function: str
    registers: int
    spills: int
    shared: int
    num_warps: int
    cluster: tuple[int, int, int]
    cooperative: bool
    parameters: tuple[tuple[int, int], ...]


class PoolRecord(_Record, frozen=True, kw_only=True):
    """A pool of a fixed size in bytes."""

    pool: Pool
    bytes: int


class MemoryPlan(_Record, frozen=True, kw_only=True):
    """Device memory of one target, in bytes.

    `budget` is all that a worker may hold; `reserve` the part of it for the CUDA context, images and graphs. The KV
    pool takes `kv_blocks` blocks of `kv_block_bytes`, all planes together; `pools` are the others.
    """

    budget: int
    reserve: int
    kv_blocks: int
    kv_block_bytes: int
    pools: tuple[PoolRecord, ...]

    def pool_bytes(self, pool: Pool, kv_blocks: int | None = None) -> int:
        """Size of `pool`; the KV pool's with `kv_blocks` blocks, or with the planned number."""
        if pool is Pool.KV:
            return (self.kv_blocks if kv_blocks is None else kv_blocks) * self.kv_block_bytes
        return next((r.bytes for r in self.pools if r.pool is pool), 0)

    @property
    def total(self) -> int:
        """Bytes of all pools and the reserve."""
        return self.reserve + sum(self.pool_bytes(pool) for pool in Pool)


class TargetRecord(_Record, frozen=True, kw_only=True):
    """What was built for one GPU. `images[i]` is the compiled form of specialisation i of the plan index.

    `tuning` are the tables that launch rules looked configurations up in, the first before the others.
    """

    part: Part
    ptxas: str
    tuning: tuple[TuningRecord, ...]
    plan_index: str
    plan_columns: str
    images: tuple[ImageRecord, ...]
    memory: MemoryPlan


class Manifest(_Record, frozen=True, kw_only=True):
    """Everything about an artifact. `toolchain` holds (name, version); `world` is the number of GPUs a worker uses.

    `files` lists every file but the manifest, sorted by path. `files` and `seal` are filled in when an artifact is written.
    """

    kind: Literal["ouro-artifact"] = "ouro-artifact"
    format: str = FORMAT
    model: ModelConfig
    source: SourceRecord
    geometry: Geometry
    modes: tuple[str, ...]
    kv: KvLayout
    kv_digest: str
    weights: WeightsRecord
    targets: tuple[TargetRecord, ...]
    toolchain: tuple[tuple[str, str], ...]
    stop_ids: tuple[int, ...]
    world: Literal[1] = 1
    files: tuple[FileRecord, ...] = ()
    seal: str = ""

    def target(self, name: str) -> TargetRecord | None:
        """The target built for the part called `name`."""
        return next((t for t in self.targets if t.part.name == name), None)


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes."""
    return msgspec.json.encode(manifest, order="sorted")


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its seal: the sha256 of its canonical bytes while the seal is empty."""
    bare = msgspec.structs.replace(manifest, seal="")
    return msgspec.structs.replace(bare, seal=identity(encode_manifest(bare)))


def identity(raw: bytes) -> str:
    """The artifact's identity: sha256 of its manifest's bytes."""
    return hashlib.sha256(raw).hexdigest()


def decode_manifest(raw: bytes, where: str = MANIFEST) -> Manifest:
    """Read a manifest strictly. Raises VersionError for a newer format, ArtifactError for anything else amiss."""
    newer_minor = _check_format(raw, where)
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        if newer_minor:
            raise _unknown_format(newer_minor, where) from error
        raise ArtifactError(str(error), where=where) from error
    if encode_manifest(manifest) != raw:
        raise ArtifactError("not in canonical form: a key is repeated or a value is spelt otherwise", where=where)
    if sealed(manifest).seal != manifest.seal:
        raise ArtifactError("the seal is not the sha256 of the rest: some field was changed", where=f"{where}: seal")
    return manifest


def check_readable(manifest: Manifest, error: Exception, where: str) -> None:
    """Raise VersionError if `error`, met at `where`, may come from what a newer format of the artifact added."""
    if _is_newer(manifest.format):
        raise _unknown_format(manifest.format, where) from error


class _Envelope(msgspec.Struct):
    kind: str = ""
    format: str = ""


def _check_format(raw: bytes, where: str) -> str:
    """The format if its minor version is newer than ours, else nothing. Raises VersionError for another major version."""
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactError(f"not a manifest: {error}", where=where) from error
    if envelope.kind != "ouro-artifact":
        raise ArtifactError(f"kind is {envelope.kind!r}, 'ouro-artifact' expected", where=where)
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", envelope.format, re.ASCII)
    if found is None:
        raise ArtifactError(f"format is {envelope.format!r}, a version such as {FORMAT} expected", where=where)
    if int(found[1]) != int(FORMAT.split(".")[0]):
        raise _unknown_format(envelope.format, where)
    return envelope.format if _is_newer(envelope.format) else ""


def _is_newer(version: str) -> bool:
    """Whether the minor version is newer than ours."""
    return int(version.split(".")[1]) > int(FORMAT.split(".")[1])


def _unknown_format(version: str, where: str) -> VersionError:
    return VersionError(
        f"format {version} is not known here (this software reads {FORMAT})",
        where=where,
        hint="Install a newer ouro-build, or build the artifact again with this one.",
    )
