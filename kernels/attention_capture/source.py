"""Triton source of `attention_capture`: programs share the (split, kv head) pairs."""

import triton
import triton.language as tl

from ouro_build.kernels.attention_decode.source import attend_all
from ouro_build.kernels.dependencies.source import release


@triton.jit
def attention_capture(
    splits, q, block_tables, kv, partial, sums, scores, plane_stride, block_stride, layer, scale, LIMIT: tl.constexpr,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
    LANES: tl.constexpr, FRAGMENTS: tl.constexpr, SCORES: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    # Keys and values are not asked for early: captures, beside which earlier layers' keys are selected, were slower for it.
    attend_all(
        splits, q, block_tables, kv, partial, sums, scores, plane_stride, block_stride, layer, scale, LIMIT, LAYERS, KV_HEADS,
        GROUP, GROUP_TILE, HEAD_DIM, TABLE_WIDTH, BLOCK_SIZE, MOST, TILE, WARPS, LANES, FRAGMENTS, SCORES, False,
        PROGRAMMATIC,
    )  # fmt: skip
