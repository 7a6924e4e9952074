"""Triton source of `attention_retained`: one program a (row, head, split of its retained keys)."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets
from ouro_build.kernels.references.source import count_of, slot_of

# Below every score, yet finite: differences of maxima stay numbers where a lane has met no key.
FLOOR = tl.constexpr(-3.0e38)


@triton.jit
def opening(table, retained, first, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """What a program knows of its `retained` positions `first` … `end` - 1 before it waits: those of three tiles, and the KV
    blocks of two."""
    lane = first + tl.arange(0, TILE)
    position = tl.load(retained + lane, mask=lane < end, other=0, cache_modifier=".cg")
    next_position = tl.load(retained + lane + TILE, mask=lane + TILE < end, other=0, cache_modifier=".cg")
    later = tl.load(retained + lane + 2 * TILE, mask=lane + 2 * TILE < end, other=0, cache_modifier=".cg")
    block = tl.load(table + position // BLOCK_SIZE, mask=lane < end, other=0, cache_modifier=".cg")
    next_block = tl.load(table + next_position // BLOCK_SIZE, mask=lane + TILE < end, other=0, cache_modifier=".cg")
    return position, next_position, later, block, next_block


@triton.jit
def gather(
    q, opened, keys, table, scores, retained, first, end, block_stride, scale, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, FROM_SCORES: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Attention of one head over `retained` positions `first` … `end` - 1, with their `scores` or with keys and `q`.

    Every lane of the tile keeps its own maximum, sum and accumulator. Where heads do not share keys and values, these leave the
    cache first, to what is read again: positions, scores, blocks. A position, its KV block and its values hang on one another:
    while one tile is used the values of the next are under way, and the block ids and positions of those after it. `opened` is
    what `opening` gives.
    """
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    first_position, position, later, first_block, block = opened
    lane = first + tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    at = keys + key_offsets(first_block, first_position, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + d[None, :]
    if FROM_SCORES:
        k = tl.load(scores + first_position, mask=lane < end, other=0.0)
    else:
        query = tl.load(q + d).to(tl.float32) * scale
        k = tl.load(at, mask=(lane < end)[:, None], other=0.0, eviction_policy=POLICY)
    v = tl.load(at + VALUES, mask=(lane < end)[:, None], other=0.0, eviction_policy=POLICY)
    top = tl.full((TILE,), FLOOR, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, HEAD_DIM), tl.float32)
    for _ in range(first, end, TILE):
        after = lane + TILE
        at = keys + key_offsets(block, position, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + d[None, :]
        if FROM_SCORES:
            next_k = tl.load(scores + position, mask=after < end, other=0.0)
        else:
            next_k = tl.load(at, mask=(after < end)[:, None], other=0.0, eviction_policy=POLICY)
        next_v = tl.load(at + VALUES, mask=(after < end)[:, None], other=0.0, eviction_policy=POLICY)
        block = tl.load(table + later // BLOCK_SIZE, mask=after + TILE < end, other=0)
        position = later
        later = tl.load(retained + after + 2 * TILE, mask=after + 2 * TILE < end, other=0)
        score = k if FROM_SCORES else tl.sum(k.to(tl.float32) * query[None, :], 1)
        score = tl.where(lane < end, score, float("-inf"))
        new_top = tl.maximum(top, score)
        weight = tl.exp(score - new_top)
        keep = tl.exp(top - new_top)
        total = total * keep + weight
        acc = acc * keep[:, None] + weight[:, None] * v.to(tl.float32)
        top, k, v, lane = new_top, next_k, next_v, after
    maximum = tl.max(top, 0)
    share = tl.exp(top - maximum)
    return tl.sum(acc * share[:, None], 0), maximum, tl.sum(total * share, 0)


@triton.jit
def put(found, to, sums_at):
    """Store a split's share: accumulator, maximum, sum."""
    acc, top, total = found
    tl.store(to, acc)
    tl.store(sums_at, top)
    tl.store(sums_at + 1, total)


@triton.jit
def attention_retained(
    rows, q, block_tables, kv, scores, reference_records, reference_keys, partial, sums, plane_stride, block_stride,
    layer, scale, SLOTS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAPACITY: tl.constexpr, SCORES: tl.constexpr,
    CONSUMES: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    POLICY: tl.constexpr = "evict_first" if HEADS == KV_HEADS else ""
    release(PROGRAMMATIC)
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    record = rows + row * 8
    slot = slot_of(record, SLOTS)
    count = count_of(record, slot, reference_records, layer, LAYERS, CAPACITY)
    loop = tl.load(record + 2, cache_modifier=".cg")
    table = block_tables + tl.load(record + 3, cache_modifier=".cg").to(tl.int64) * TABLE_WIDTH
    mode = tl.load(record + 4, cache_modifier=".cg")
    if SCORES == 0:
        mode = mode * 0 + 2
    if not CONSUMES:
        mode = mode * 0 + 1
    span = tl.cdiv(tl.cdiv(count, TILE), SPLITS) * TILE
    first = split * span
    end = tl.minimum(first + span, count)
    retained = reference_keys + ((slot.to(tl.int64) * LAYERS + layer) * HEADS + head) * CAPACITY
    keys = kv + head_offset(plane_stride, loop, layer, head // (HEADS // KV_HEADS), LAYERS, BLOCK_SIZE, HEAD_DIM)
    opened = opening(table, retained, first, end, BLOCK_SIZE, TILE)
    wait(PROGRAMMATIC)
    if count > 0:
        row_head = row.to(tl.int64) * HEADS + head
        sums_at = sums + (row_head * SPLITS + split) * 2
        if first < end:
            to = partial + (row_head * SPLITS + split) * HEAD_DIM + tl.arange(0, HEAD_DIM)
            if mode == 1:
                if SCORES:
                    found = gather(
                        q, opened, keys, table, scores + row_head * SCORES, retained, first, end, block_stride,
                        scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, True, POLICY,
                    )  # fmt: skip
                    put(found, to, sums_at)
            else:
                if CONSUMES:
                    found = gather(
                        q + row_head * HEAD_DIM, opened, keys, table, scores, retained, first, end, block_stride,
                        scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE, False, POLICY,
                    )  # fmt: skip
                    put(found, to, sums_at)
        else:
            tl.store(sums_at, float("-inf"))
            tl.store(sums_at + 1, 0.0)
