"""Triton source of `attention_capture`: one program a (row, kv head, split of the context)."""

import triton
import triton.language as tl

from ouro_build.kernels.attention_decode.source import attend
from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def attention_capture(
    rows, q, block_tables, kv, partial, sums, scores, plane_stride, block_stride, layer, scale, LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, SCORES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    attend(
        rows, q, block_tables, kv, partial, sums, scores, plane_stride, block_stride, layer, scale, LAYERS, KV_HEADS, GROUP,
        GROUP_TILE, HEAD_DIM, TABLE_WIDTH, BLOCK_SIZE, SPLITS, TILE, SCORES,
    )  # fmt: skip
