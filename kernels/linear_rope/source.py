"""Triton source of `linear_rope`: `linear_few` over the pairs of a head that a rotation mixes, with the rotation at its end."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.linear_few.source import early, fragment_rows, multiply
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets


@triton.jit
def linear_rope(
    rows, x, weight, blocks, rotation, kv, q, plane_stride, block_stride, layer, ROWS: tl.constexpr, K: tl.constexpr,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr,
    K_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    HALF: tl.constexpr = HEAD_DIM // 2
    EIGHTS: tl.constexpr = PAIRS // 8
    TYPE: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(0) // (HALF // PAIRS)
    part = tl.program_id(0) % (HALF // PAIRS) * PAIRS
    eight = tl.arange(0, 2 * EIGHTS)
    n = head * HEAD_DIM + part + (eight // EIGHTS * HALF + eight % EIGHTS * 8)[:, None] + tl.arange(0, 8)[None, :]
    ahead = early(weight, n, K, BLOCK_K, AHEAD, K_WARPS)
    wait(PROGRAMMATIC)
    # What the rotation and the cache need is asked for before the products, so that it is there after them.
    row = tl.arange(0, ROW_TILE)
    record = rows + row * 8
    live = tl.load(record, mask=row < ROWS, other=-1) >= 0
    position = tl.load(record + 1, mask=row < ROWS, other=0)
    loop = tl.load(record + 2, mask=row < ROWS, other=0)
    block = tl.load(blocks + row, mask=row < ROWS, other=0)
    at = part + tl.arange(0, PAIRS)
    turn = rotation + row[None, :] * HEAD_DIM + at[:, None]
    cos = tl.load(turn, mask=(row < ROWS)[None, :], other=0.0)
    sin = tl.load(turn + HALF, mask=(row < ROWS)[None, :], other=0.0)
    each = tl.minimum(fragment_rows(ROW_TILE), ROWS - 1)  # rows past the last repeat it
    both = multiply(
        ahead, x, each, each >= 0, weight, n, K, 2 * PAIRS, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, False
    )  # fmt: skip
    first, second = tl.split(both.to(TYPE).to(tl.float32).reshape(2, PAIRS, ROW_TILE).permute(1, 2, 0))
    if head < HEADS + KV_HEADS:  # values are not rotated
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    if head < HEADS:
        to = q + (row.to(tl.int64) * HEADS + head)[None, :] * HEAD_DIM + at[:, None]
    else:
        # Heads of keys and then of values follow each other in a block.
        place = head_offset(plane_stride, loop, layer, head - HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM)
        place += key_offsets(block, position, block_stride, BLOCK_SIZE, HEAD_DIM)
        to = kv + place[None, :] + at[:, None]
    tl.store(to, first.to(TYPE), mask=live[None, :])
    tl.store(to + HALF, second.to(TYPE), mask=live[None, :])
