"""Triton source of `linear_rope`: `linear_few` over the pairs of a head that a rotation mixes, with the rotation at its end."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.linear_few.source import early, fragment_rows, load_x, multiply, row_places, weight_places
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets


@triton.jit
def first_row(tile, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The first weight row of a tile: a head has a tile for every PAIRS elements of its first half."""
    return tile // (HALF // PAIRS) * (2 * HALF) + tile % (HALF // PAIRS) * PAIRS


@triton.jit
def rotate_and_write(
    parts, tile, rows, blocks, rotation, kv, q, plane_stride, block_stride, layer, ROWS: tl.constexpr, LAYERS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr,
    ROW_TILE: tl.constexpr,
):  # fmt: skip
    """Sum the warps' shares of a tile's products, rotate them unless they are values, write them to `q` or `kv`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    TYPE: tl.constexpr = q.dtype.element_ty
    head = tile // (HALF // PAIRS)
    at = tile % (HALF // PAIRS) * PAIRS + tl.arange(0, PAIRS)
    row = tl.arange(0, ROW_TILE)
    record = rows + row * 8
    live = tl.load(record, mask=row < ROWS, other=-1) >= 0
    position = tl.load(record + 1, mask=row < ROWS, other=0)
    loop = tl.load(record + 2, mask=row < ROWS, other=0)
    block = tl.load(blocks + row, mask=row < ROWS, other=0)
    turn = rotation + row[None, :] * HEAD_DIM + at[:, None]
    cos = tl.load(turn, mask=(row < ROWS)[None, :], other=0.0)
    sin = tl.load(turn + HALF, mask=(row < ROWS)[None, :], other=0.0)
    both = tl.sum(parts, 0).to(TYPE).to(tl.float32)
    first, second = tl.split(both.reshape(2, PAIRS, ROW_TILE).permute(1, 2, 0))
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


@triton.jit
def linear_rope(
    rows, x, weight, blocks, rotation, kv, q, plane_stride, block_stride, layer, ROWS: tl.constexpr, K: tl.constexpr,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr,
    K_WARPS: tl.constexpr, TILES: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    HALF: tl.constexpr = HEAD_DIM // 2
    EIGHTS: tl.constexpr = PAIRS // 8
    STEPS: tl.constexpr = (K + K_WARPS * BLOCK_K - 1) // (K_WARPS * BLOCK_K)
    ALL: tl.constexpr = (HEADS + 2 * KV_HEADS) * (HALF // PAIRS)
    eight = tl.arange(0, 2 * EIGHTS)
    pairs = (eight // EIGHTS * HALF + eight % EIGHTS * 8)[:, None] + tl.arange(0, 8)[None, :]
    # Tiles past the end repeat the last: the loads need no mask.
    tile = tl.program_id(0)
    at = weight_places(weight, first_row(tile, HALF, PAIRS) + pairs, K, BLOCK_K, K_WARPS)
    ahead = early(at, K, BLOCK_K, AHEAD, K_WARPS)
    wait(PROGRAMMATIC)
    each = tl.minimum(fragment_rows(ROW_TILE), ROWS - 1)
    x_at = row_places(x, each, K, BLOCK_K, K_WARPS)
    xs = load_x(x_at, each, K, BLOCK_K, K_WARPS, X_AHEAD, False)
    for i in tl.static_range(TILES):
        after = tl.minimum(tile + tl.num_programs(0), ALL - 1)
        next_at = weight_places(weight, first_row(after, HALF, PAIRS) + pairs, K, BLOCK_K, K_WARPS)
        parts, ahead = multiply(
            ahead, at, next_at, xs, x_at, each, K, 2 * PAIRS, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, False, i == TILES - 1
        )  # fmt: skip
        rotate_and_write(
            parts, tile, rows, blocks, rotation, kv, q, plane_stride, block_stride, layer, ROWS, LAYERS, HEADS, KV_HEADS,
            HEAD_DIM, BLOCK_SIZE, PAIRS, ROW_TILE,
        )  # fmt: skip
        if i < TILES - 1:
            if X_AHEAD < STEPS:
                xs = load_x(x_at, each, K, BLOCK_K, K_WARPS, X_AHEAD, False)
            tile = after
            at = next_at
