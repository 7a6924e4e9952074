"""A launch for every entry of a tuning table: what its kernel does with it at a shape of its kind."""

from __future__ import annotations

from collections.abc import Callable

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Launch, LoadTimeValue
from ouro_build.artifacts.tuning import Entry
from ouro_build.kernels.attention_decode import attention_decode, split_rule
from ouro_build.kernels.linear_few import linear_few
from ouro_build.kernels.linear_rope import linear_rope
from ouro_build.kernels.linear_silu import linear_silu
from tests.kernel_harness import buffer, matrix_buffer

HEAD_DIM, PLANES, LAYERS, CONTEXT, BLOCK_SIZE = 128, 96, 24, 4096, 16
# [N, K] of a kind; N of `linear_rope` is that of so many heads, with as many key and value heads.
MATRICES = {"middle": (6144, 2048), "narrow": (2048, 2048), "tall": (11264, 2048), "deep": (2048, 5632)}
HEADS = {"middle": (16, 2048), "narrow": (8, 2048), "tall": (32, 2048), "deep": (16, 5632)}
USED = (("linear_few", "narrow"), ("linear_few", "deep"), ("linear_few", "tall"), ("linear_rope", "middle"),
        ("linear_silu", "tall"))  # fmt: skip
"""Kernels and kinds of the presets of full size."""


def launch_of(part: Part, entry: Entry, rows: int | None = None) -> Launch:
    """Of the entry's kernel, for a bucket of `rows` or the entry's own (1 where it is for any number)."""
    return RULES[entry.kernel](part, "bfloat16" if entry.bits == 16 else "float32", rows or entry.rows or 1, entry.kind)


def _linear(part: Part, dtype: str, bucket: int, kind: str) -> Launch:
    size, width = MATRICES[kind]
    return linear_few(
        part,
        rows=buffer("rows", "int32", bucket, 8),
        x=buffer("x", dtype, bucket, width),
        weight=matrix_buffer("weight", dtype, size, width),
        out=buffer("out", dtype, bucket, size),
        gather=False,
    )


def _silu(part: Part, dtype: str, bucket: int, kind: str) -> Launch:
    size, width = MATRICES[kind]
    return linear_silu(
        part,
        rows=buffer("rows", "int32", bucket, 8),
        x=buffer("x", dtype, bucket, width),
        weight=matrix_buffer("weight", dtype, size, width),
        out=buffer("out", dtype, bucket, size // 2),
    )


def _rope(part: Part, dtype: str, bucket: int, kind: str) -> Launch:
    heads, width = HEADS[kind]
    return linear_rope(
        part,
        rows=buffer("rows", "int32", bucket, 8),
        x=buffer("x", dtype, bucket, width),
        weight=matrix_buffer("weight", dtype, 3 * heads * HEAD_DIM, width),
        blocks=buffer("blocks", "int32", bucket),
        rotation=buffer("rotation", "float32", bucket, 2, HEAD_DIM // 2),
        kv=buffer("kv", dtype, PLANES, LoadTimeValue.KV_BLOCKS, 2, heads, BLOCK_SIZE, HEAD_DIM),
        q=buffer("q", dtype, bucket, heads, HEAD_DIM),
        layer=0,
        layers=LAYERS,
    )


def _attention(part: Part, dtype: str, bucket: int, kind: str) -> Launch:
    heads, kv_heads = 16, 16 if kind == "single" else 4
    rule = split_rule(part, bucket, heads, kv_heads, HEAD_DIM, dtype)
    most = rule.most(CONTEXT)
    return attention_decode(
        part,
        splits=buffer("splits", "int32", bucket * most, rule.record),
        q=buffer("q", dtype, bucket, heads, HEAD_DIM),
        block_tables=buffer("block_tables", "int32", 8, CONTEXT // BLOCK_SIZE),
        kv=buffer("kv", dtype, PLANES, LoadTimeValue.KV_BLOCKS, 2, kv_heads, BLOCK_SIZE, HEAD_DIM),
        partial=buffer("partial", "float32", bucket, heads, most, HEAD_DIM),
        sums=buffer("sums", "float32", bucket, heads, most, 2),
        layer=3,
        layers=LAYERS,
        rule=rule,
    )


RULES: dict[str, Callable[[Part, str, int, str], Launch]] = {
    "attention_decode": _attention,
    "linear_few": _linear,
    "linear_rope": _rope,
    "linear_silu": _silu,
}
