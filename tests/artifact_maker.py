"""Small artifacts for tests: real manifests, plans and weights of `preset:tiny`, and cubins of no meaning."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ouro_build.artifacts.columns import GraphEntry, LoadTimeEntry, encode
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import (
    KV_AXES,
    ImageRecord,
    KvLayout,
    Manifest,
    MemoryPlan,
    PoolRecord,
    SourceRecord,
    TargetRecord,
    WeightsRecord,
)
from ouro_build.artifacts.oracle import Oracle, encode_oracle
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Buffer, Edge, Launch, LoadTimeValue, Options, Plan, Pool, ProgramKey, Specialization
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.publish import publishing
from ouro_build.artifacts.weight_stream import write_weights
from ouro_build.artifacts.writer import Content, plan_files, plan_paths, write_artifact

MODEL = PRESETS["tiny"].model
GEOMETRY = Geometry(buckets=(1, 2), prefill_buckets=(16,), max_context=64, max_requests=2, block_size=16)
KV_BLOCKS = 8
GIB = 1 << 30
BLOCK_BYTES = GEOMETRY.block_bytes(MODEL)

KV = Buffer(
    "kv",
    Pool.KV,
    MODEL.dtype,
    (MODEL.planes, LoadTimeValue.KV_BLOCKS, 2, MODEL.kv_heads, GEOMETRY.block_size, MODEL.head_dim),
    0,
)
BATCH = Buffer("batch", Pool.IO, "int32", (2,), 256)
EMBEDDING = Buffer("embedding", Pool.WEIGHTS, MODEL.dtype, (MODEL.vocab_size, MODEL.hidden_size), 256)
ROWS = Buffer("rows", Pool.WORKSPACE, "float32", (2, 64), 0)
OPTIONS = Options(num_warps=4, num_stages=2)
GATHER = Specialization(
    kernel="gather",
    contract=1,
    types=(("weight", "*bf16"), ("batch", "*i32"), ("out", "*fp32"), ("eps", "fp32"), ("n", "i32")),
    constants=(("SIZE", 64), ("FAST", True), ("MASK", None), ("KIND", "plain")),
    divisible=("weight", "batch", "out"),
    options=OPTIONS,
)
STORE = Specialization(
    kernel="store",
    contract=2,
    types=(("x", "*fp32"), ("kv", "*bf16"), ("stride", "i64")),
    constants=(),
    divisible=("x", "kv", "stride"),
    options=Options(num_warps=4, num_stages=2, programmatic=True),
)
_GATHER = Launch(specialization=GATHER, grid=(2, 1, 1), arguments=(EMBEDDING, BATCH, ROWS, 0.5, -3))
_STORE = Launch(
    specialization=STORE,
    grid=(LoadTimeValue.SM_COUNT, 2, 1),
    arguments=(ROWS, KV, LoadTimeValue.KV_PLANE_STRIDE),
    after=((0, Edge.PROGRAMMATIC),),
)
PLANS = (
    Plan(ProgramKey("prelude", 1), (_GATHER,)),
    Plan(ProgramKey("recurrent", 2), (_GATHER, _STORE)),
)
ORACLE = Oracle(prompt_ids=(1, 2, 3), greedy_ids=(4, 5), margins=(64, 3))
TOKENIZER = b'{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"a"}}'
"""A tokenizer of two words, as its library stores it."""


def no_cubin(image: ImageRecord) -> bytes:
    """What looks like an image and is none."""
    return f"\x7fELF {image.path}".encode() * 20


def make_artifact(
    path: Path,
    parts: tuple[str, ...] = ("h200", "rtx-5090"),
    *,
    embedded: bool = False,
    cubin: Callable[[ImageRecord], bytes] = no_cubin,
    graphs: tuple[GraphEntry, ...] | None = None,
    **changes: Any,
) -> Path:
    """Publish an artifact at `path`.

    `cubin` gives the bytes of each image, `graphs` replace those of single plans, `changes` fields of its manifest.
    """
    weights = io.BytesIO()
    record = weights_record(weights)
    manifest = msgspec.structs.replace(base_manifest(parts, record, embedded=embedded), **changes)
    files: dict[str, Content] = dict(plan_files(manifest, dict.fromkeys(parts, encoded_plans(graphs))))
    files["oracle.json"] = encode_oracle(ORACLE)
    files["tokenizer/tokenizer.json"] = TOKENIZER
    for target in manifest.targets:
        files.update({image.path: cubin(image) for image in target.images})
    if embedded:
        files["weights.safetensors"] = lambda out: void(out.write(weights.getvalue()))
    with publishing(path) as folder:
        write_artifact(folder, manifest, files)
    return path


def weights_record(out: BinaryIO | None = None) -> WeightsRecord:
    """The record of the weights, written to `out` if there is one."""
    return write_weights(PRESETS["tiny"].weights(MODEL.dtype, 7), MODEL, out)


def void(_: object) -> None:
    """Turns an expression into a statement."""


def encoded_plans(graphs: tuple[GraphEntry, ...] | None = None) -> Any:
    """(index, columns) of `PLANS`, with these graphs in place of one a plan."""
    index, columns = encode(PLANS, (KV, BATCH, EMBEDDING, ROWS), (LoadTimeEntry(LoadTimeValue.KV_PLANE_STRIDE, 16),))
    return (index if graphs is None else msgspec.structs.replace(index, graphs=graphs)), columns


def base_manifest(parts: tuple[str, ...], weights: Any, *, embedded: bool = False) -> Manifest:
    """A manifest for `parts` whose files are not yet known."""
    planes = tuple(tuple(range(u * MODEL.layers, (u + 1) * MODEL.layers)) for u in range(MODEL.loops))
    kv = KvLayout(
        axes=KV_AXES,
        planes=planes,
        block_size=GEOMETRY.block_size,
        kv_heads=MODEL.kv_heads,
        head_dim=MODEL.head_dim,
        dtype=MODEL.dtype,
    )
    return Manifest(
        model=MODEL,
        source=SourceRecord(kind="preset", name="tiny", synthetic=True, seed=7),
        geometry=GEOMETRY,
        modes=("dense",),
        kv=kv,
        kv_digest=kv.digest,
        weights=msgspec.structs.replace(weights, embedded=embedded),
        targets=tuple(target(name, weights.bytes) for name in parts),
        toolchain=(("triton", "3.9.0"),),
        stop_ids=(0,),
    )


def target(name: str, weights_bytes: int = 1 << 20, *, kv_blocks: int = KV_BLOCKS) -> TargetRecord:
    """A target for the part `name`."""
    part = find_part(name)
    index, columns = plan_paths(part.name)
    return TargetRecord(
        part=part,
        ptxas="12.9" if part.capability < 90 else "13.4",
        plan_index=index,
        plan_columns=columns,
        images=tuple(
            ImageRecord(
                path=f"images/{part.arch}/{s.kernel}.cubin",
                function=s.kernel,
                registers=32,
                spills=0,
                shared=1024,
                num_warps=4,
                cluster=(1, 1, 1),
                cooperative=False,
                parameters=tuple((8 * i, 8) for i in range(len(s.types) + 2)),
            )
            for s in (GATHER, STORE)
        ),
        memory=MemoryPlan(
            budget=2 * GIB,
            reserve=GIB,
            kv_blocks=kv_blocks,
            kv_block_bytes=BLOCK_BYTES,
            pools=(
                PoolRecord(pool=Pool.WEIGHTS, bytes=weights_bytes),
                PoolRecord(pool=Pool.WORKSPACE, bytes=512),
                PoolRecord(pool=Pool.IO, bytes=512),
            ),
        ),
    )
