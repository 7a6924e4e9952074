"""Triton source of `attention_prefill`: one program a (tile of rows, head), one pass over the keys a request in the tile."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets

# Below every score, yet finite: differences of maxima stay numbers in rows that a pass does not concern.
FLOOR = tl.constexpr(-3.0e38)
# After every (request, loop).
NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def attend_tiles(
    query, keys, table, last, start, stop, top, total, acc, block_stride, scale, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with the tiles of keys from `start` to `stop`; unless MASKED, every row sees all of them."""
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    d = tl.arange(0, HEAD_DIM)
    for tile in range(start, stop, TILE):
        lane = tile + tl.arange(0, TILE)
        inside = (lane < stop)[:, None]
        block = (
            tl.load(table + lane // BLOCK_SIZE, mask=lane < stop, other=0) if MASKED else tl.load(table + lane // BLOCK_SIZE)
        )
        at = keys + key_offsets(block, lane, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + d[None, :]
        k = tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            score = tl.where(lane[None, :] <= last[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weight, 1)
        v = tl.load(at + VALUES, mask=inside, other=0.0) if MASKED else tl.load(at + VALUES)
        acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def attend(
    query, keys, table, last, block_stride, scale, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's rows over one request's keys; `last` is each row's last position, -1 for another's row.

    APART: keys that every row sees are taken in a loop of their own, without masks.
    """
    end = tl.max(last, 0) + 1
    top = tl.full((BLOCK_M,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    seen = 0
    if APART:
        seen = (tl.min(last, 0) + 1) // TILE * TILE  # 0 if a row is another's
        top, total, acc = attend_tiles(
            query, keys, table, last, 0, seen, top, total, acc, block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, False
        )  # fmt: skip
    top, total, acc = attend_tiles(
        query, keys, table, last, seen, end, top, total, acc, block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, True
    )  # fmt: skip
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def attention_prefill(
    rows, q, block_tables, kv, out, plane_stride, block_stride, layer, scale, ROWS: tl.constexpr, LAYERS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, APART: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    # The last rows of a chunk see most keys: they start first.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    record = rows + row * 8
    live = tl.load(record, mask=row < ROWS, other=-1) >= 0
    position = tl.load(record + 1, mask=live, other=-1)
    loop = tl.load(record + 2, mask=live, other=0).to(tl.int64)
    request = tl.load(record + 3, mask=live, other=0).to(tl.int64)
    # Rows of one request and loop see the same keys: each such set is one pass.
    owner = tl.where(live, request << 32 | loop, NONE)

    d = tl.arange(0, HEAD_DIM)
    at = (row.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(q + at, mask=live[:, None], other=0.0)
    log2_scale = scale * 1.4426950408889634
    current = tl.min(owner, 0)
    while current < NONE:
        member = owner == current
        table = block_tables + (current >> 32) * TABLE_WIDTH
        plane_loop = current & 0xFFFFFFFF
        keys = kv + head_offset(plane_stride, plane_loop, layer, head // (HEADS // KV_HEADS), LAYERS, BLOCK_SIZE, HEAD_DIM)
        last = tl.where(member, position, -1)
        y = attend(query, keys, table, last, block_stride, log2_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, TILE, APART)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=member[:, None])
        current = tl.min(tl.where(owner > current, owner, NONE), 0)
