"""The matrix and attention kernels compile for GPUs that are not there, within each one's limits and without spills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.parts import Part, find_part
from ouro_build.artifacts.plan import Launch, LoadTimeValue, ProgramKey, Specialization
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.retention import retained_counts
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.compile import compile_images, jobs
from ouro_build.builder.limits import check_limits
from ouro_build.builder.record import Recorder
from ouro_build.builder.sparse import SparseAttention
from ouro_build.builder.toolchain import find_toolchain
from ouro_build.kernels.attention_decode import attention_decode, split_rule
from ouro_build.kernels.attention_merge import attention_merge
from ouro_build.kernels.attention_prefill import attention_prefill
from ouro_build.kernels.linear import fused, linear
from ouro_build.kernels.linear_rope import linear_rope
from ouro_build.kernels.linear_silu import linear_silu
from ouro_build.kernels.rope_kv_write import rope_kv_write
from ouro_build.kernels.split_contexts import split_contexts
from tests.kernel_cases import STACK
from tests.kernel_harness import buffer, matrix_buffer

# Ouro-1.4B: (N, K) of its projections, the LM head last
PROJECTIONS = ((6144, 2048), (2048, 2048), (11264, 2048), (2048, 5632), (49152, 2048))
LONGEST, RETENTION = 65536, 0.1
HIDDEN, HEAD_DIM, PLANES, LAYERS, CONTEXT, BLOCK_SIZE = 2048, 128, 96, 24, 4096, 16
# Buckets of each kind; every one of them with all projections would compile the same code many times over.
FAST = (("sm_90", "bfloat16", (1, 16, 512)), ("sm_100", "bfloat16", (8,)),
        ("sm_120", "bfloat16", (8, 512)), ("sm_80", "bfloat16", (16, 64)),
        ("sm_120", "float32", (1, 64)))  # fmt: skip
FULL = tuple(
    (arch, dtype, (1, 8, 16, 64, 512)) for arch in ("sm_80", "sm_90", "sm_120") for dtype in ("bfloat16", "float32")
)  # fmt: skip
EVERY = os.environ.get("OURO_TEST_EVERY_IMAGE") == "1"


def linears(part: Part, dtype: str, bucket: int) -> Iterator[Launch]:
    """One projection a bucket in the fast run, all of them in the full one."""
    chosen = PROJECTIONS if EVERY else (PROJECTIONS[bucket % len(PROJECTIONS)],)
    for size, width in chosen:
        head = size == PROJECTIONS[-1][0]
        yield linear(
            part,
            rows=buffer("rows", "int32", bucket, 8),
            x=buffer("x", dtype, bucket, width),
            weight=matrix_buffer("weight", dtype, size, width),
            out=buffer("out", "float32" if head else dtype, bucket, size),
            gather=head,
        )


def fused_linears(part: Part, dtype: str, bucket: int) -> Iterator[Launch]:
    """The projections that go on to do more."""
    if not fused(bucket, dtype):
        return
    heads, inner = HIDDEN // HEAD_DIM, PROJECTIONS[2][0] // 2
    rows, x = buffer("rows", "int32", bucket, 8), buffer("x", dtype, bucket, HIDDEN)
    yield linear_silu(
        part, rows=rows, x=x, weight=matrix_buffer("weight", dtype, 2 * inner, HIDDEN), out=buffer("out", dtype, bucket, inner)
    )
    yield linear_rope(
        part,
        rows=rows,
        x=x,
        weight=matrix_buffer("weight", dtype, 3 * HIDDEN, HIDDEN),
        blocks=buffer("blocks", "int32", bucket),
        rotation=buffer("rotation", "float32", bucket, 2, HEAD_DIM // 2),
        kv=buffer("kv", dtype, PLANES, LoadTimeValue.KV_BLOCKS, 2, heads, BLOCK_SIZE, HEAD_DIM),
        q=buffer("q", dtype, bucket, heads, HEAD_DIM),
        layer=0,
        layers=LAYERS,
    )


def attentions(part: Part, dtype: str, bucket: int, heads: int, kv_heads: int) -> Iterator[Launch]:
    """Decode, with the cutting before and the merge after it, for few rows, prefill for many."""
    rows = buffer("rows", "int32", bucket, 8)
    q = buffer("q", dtype, bucket, heads, HEAD_DIM)
    tables = buffer("block_tables", "int32", 8, CONTEXT // BLOCK_SIZE)
    kv = buffer("kv", dtype, PLANES, LoadTimeValue.KV_BLOCKS, 2, kv_heads, BLOCK_SIZE, HEAD_DIM)
    out = buffer("out", dtype, bucket, heads * HEAD_DIM)
    rule = split_rule(part, bucket, heads, kv_heads, HEAD_DIM, dtype)
    most = rule.most(CONTEXT)
    splits = buffer("splits", "int32", bucket * most, rule.record)
    counts = buffer("counts", "int32", bucket)
    partial = buffer("partial", "float32", bucket, heads, most, HEAD_DIM)
    sums = buffer("sums", "float32", bucket, heads, most, 2)
    if EVERY or bucket <= 64:
        yield split_contexts(
            part, rows=rows, batch=rows, block_tables=tables, splits=splits, counts=counts, rule=rule, block_size=BLOCK_SIZE
        )
        yield attention_decode(
            part,
            splits=splits,
            q=q,
            block_tables=tables,
            kv=kv,
            partial=partial,
            sums=sums,
            layer=3,
            layers=LAYERS,
            rule=rule,
        )
        yield attention_merge(part, counts=counts, partial=partial, sums=sums, out=out)
    if bucket >= 16:
        yield attention_prefill(part, rows=rows, q=q, block_tables=tables, kv=kv, out=out, layer=3, layers=LAYERS)


def sparse_attentions(part: Part, dtype: str, bucket: int, heads: int, kv_heads: int) -> Iterator[Launch]:
    """What the modes other than dense launch beside that, for the longest context."""
    counts = retained_counts(LONGEST, RETENTION)
    geometry = Geometry(
        buckets=(bucket,), prefill_buckets=(), max_context=LONGEST, max_requests=bucket, block_size=BLOCK_SIZE,
        sparse_modes=SPARSE_MODES, key_retention=RETENTION, key_capacity=int(counts[-1]), reference_slots=bucket,
    )  # fmt: skip
    model = replace(PRESETS["ouro-1.4b"].model, dtype=dtype, heads=heads, kv_heads=kv_heads)
    attention = SparseAttention(model, geometry, part, make_buffers(model, geometry, {}))
    rows, q = buffer("rows", "int32", bucket, 8), buffer("q", dtype, bucket, heads, HEAD_DIM)
    for form in attention.forms():
        recorder = Recorder(ProgramKey("recurrent", bucket, *form))
        attention.of(*form)(recorder, rows)(q, 3)
        yield from recorder.plan().launches


def specializations(part: Part, dtype: str, buckets: tuple[int, ...]) -> tuple[Specialization, ...]:
    """Every distinct image of the part."""
    launches = [
        launch
        for bucket in buckets
        for source in (
            linears(part, dtype, bucket),
            fused_linears(part, dtype, bucket),
            attentions(part, dtype, bucket, 16, 16),
            attentions(part, dtype, bucket, 16, 4) if EVERY or bucket == buckets[0] else (),
            sparse_attentions(part, dtype, bucket, 16, 16) if EVERY or bucket == buckets[0] else (),
            sparse_attentions(part, dtype, bucket, 16, 4) if EVERY else (),
        )
        for launch in source
    ]
    return tuple(dict.fromkeys(launch.specialization for launch in launches))


@pytest.mark.parametrize(("arch", "dtype", "buckets"), FULL if EVERY else FAST)
def test_images_fit(arch: str, dtype: str, buckets: tuple[int, ...], tmp_path: Path) -> None:
    part = find_part(arch)
    wanted = specializations(part, dtype, buckets)
    made = jobs(wanted, part.arch, find_toolchain([part]))
    images = compile_images(made, ImageCache(tmp_path), workers=2).images
    for job in made:
        image = images[job.key]
        print(f"{job}: {image.registers} registers, {image.spills} B spilled, {image.shared} B shared")
        check_limits(part, job.specialization, image)
        assert image.spills <= STACK.get(job.specialization.kernel, 0), f"{job} spills {image.spills} bytes"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_selections_of_few_rows_and_of_many_do_not_spill(arch: str, tmp_path: Path) -> None:
    part = find_part(arch)
    made = [x.specialization for bucket in (1, 32) for x in sparse_attentions(part, "bfloat16", bucket, 16, 16)]
    wanted = jobs([s for s in dict.fromkeys(made) if s.kernel == "attention_select"], part.arch, find_toolchain([part]))
    assert sorted(job.specialization.options.num_warps for job in wanted) == [16, 32]
    images = compile_images(wanted, ImageCache(tmp_path), workers=2).images
    assert [images[job.key].spills for job in wanted] == [0, 0]
    # Two programs of many rows' share a multiprocessor where the registers were asked for that.
    assert part.capability // 10 == 10 or all(images[job.key].registers <= 64 for job in wanted)


def test_a_layer_is_an_argument_not_an_image() -> None:
    part = find_part("h200")
    first, other = (
        rope_kv_write(
            part,
            rows=buffer("rows", "int32", 1, 8),
            blocks=buffer("blocks", "int32", 1),
            rotation=buffer("rotation", "float32", 1, 2, HEAD_DIM // 2),
            qkv=buffer("qkv", "bfloat16", 1, 3 * HIDDEN),
            kv=buffer("kv", "bfloat16", PLANES, LoadTimeValue.KV_BLOCKS, 2, 16, BLOCK_SIZE, HEAD_DIM),
            q=buffer("q", "bfloat16", 1, 16, HEAD_DIM),
            layer=layer,
            layers=LAYERS,
        )
        for layer in (0, 7)
    )
    assert first.specialization == other.specialization
