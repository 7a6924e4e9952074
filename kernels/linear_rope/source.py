"""Triton source of `linear_rope`: `linear_few` over the pairs of a head that a rotation mixes, with the rotation at its end."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release
from ouro_build.kernels.linear_few.source import multiply


@triton.jit
def linear_rope(
    rows, x, weight, inv_freq, block_tables, kv, q, plane_stride, block_stride, layer, ROWS: tl.constexpr, K: tl.constexpr,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr,
    K_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    HALF: tl.constexpr = HEAD_DIM // 2
    TYPE: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(0) // (HALF // 8)
    at = tl.program_id(0) % (HALF // 8) * 8 + tl.arange(0, 8)
    frequency = tl.load(inv_freq + at)
    n = head * HEAD_DIM + (tl.arange(0, 2) * HALF)[:, None] + at[None, :]
    both = multiply(rows, x, weight, n, ROWS, K, False, 16, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, PROGRAMMATIC)
    first, second = tl.split(both.to(TYPE).to(tl.float32).reshape(2, 8, ROW_TILE).permute(1, 2, 0))

    row = tl.arange(0, ROW_TILE)
    record = rows + row * 8
    live = tl.load(record, mask=row < ROWS, other=-1) >= 0
    position = tl.load(record + 1, mask=live, other=0)
    if head < HEADS + KV_HEADS:  # values are not rotated
        angle = frequency[:, None] * position.to(tl.float32)[None, :]
        cos = tl.cos(angle)
        sin = tl.sin(angle)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    if head < HEADS:
        to = q + (row.to(tl.int64) * HEADS + head)[None, :] * HEAD_DIM + at[:, None]
    else:
        plane = (tl.load(record + 2, mask=live, other=0) * LAYERS + layer).to(tl.int64)
        request = tl.load(record + 3, mask=live, other=0).to(tl.int64)
        entry = block_tables + request * TABLE_WIDTH + position // BLOCK_SIZE
        block = tl.load(entry, mask=live, other=0).to(tl.int64)
        # Heads of keys and then of values follow each other in a block.
        place = plane * plane_stride + block * block_stride
        place += ((head - HEADS) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        to = kv + place[None, :] + at[:, None]
    tl.store(to, first.to(TYPE), mask=live[None, :])
    tl.store(to + HALF, second.to(TYPE), mask=live[None, :])
