"""Triton source of `attention_decode`: programs share the (split, kv head) pairs."""

# mypy: disable-error-code="assignment"
# (a tuple that is empty or not, by a constant)

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets

# Below every score, yet finite: differences of maxima stay numbers where a lane has met no key.
FLOOR = tl.constexpr(-3.0e38)


@triton.jit
def ranked(score):
    """Scores among which a largest can be found: NaN, which has no place, becomes the least of them."""
    return tl.where(score > float("-inf"), score, float("-inf"))


@triton.jit
def opening(
    splits, at, block_tables, kv, plane_stride, block_stride, layer, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What a program knows of pair `at` before it waits: its row (-1: there is none), the split's index, where the head's keys
    and the request's blocks are, first and end; of a single head also the KV blocks of two tiles, and if EARLY the settled
    position and of the first tile keys and values before that, which no row of the batch writes.

    All of the record is asked for at once. Where it is of no split, the rest of it may be anything, and there are no keys.
    """
    record = splits + at // KV_HEADS * (8 + TILE)
    row = tl.load(record, cache_modifier=".cg")
    index = tl.load(record + 1, cache_modifier=".cg")
    first = tl.where(row >= 0, tl.load(record + 3, cache_modifier=".cg"), 0)
    end = tl.where(row >= 0, tl.load(record + 4, cache_modifier=".cg"), 0)
    table = block_tables + tl.load(record + 5, cache_modifier=".cg").to(tl.int64) * TABLE_WIDTH
    keys = kv + head_offset(
        plane_stride, tl.load(record + 6, cache_modifier=".cg"), layer, at % KV_HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM
    )
    ahead = ()
    if GROUP == 1:
        block = tl.load(record + 8 + tl.arange(0, TILE), cache_modifier=".cg")
        lane = first + tl.arange(0, TILE)
        next_block = tl.load(table + (lane + TILE) // BLOCK_SIZE, mask=lane + TILE < end, other=0, cache_modifier=".cg")
        ahead = (block, next_block)
    if EARLY:
        settled = tl.load(record + 7, cache_modifier=".cg")
        k_at = keys + key_offsets(block, lane, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        there = (lane < tl.minimum(end, settled))[:, None]
        k = tl.load(k_at, mask=there, other=0.0, cache_modifier=".cg")
        v = tl.load(k_at + KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=there, other=0.0, cache_modifier=".cg")
        ahead = (block, next_block, settled, k, v)
    return row, index, keys, table, first, end, ahead


@triton.jit
def single_head(
    q, ahead, keys, table, scores, first, end, block_stride, scale, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SCORES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query head: products and sums, memory-bound. `ahead` is what `opening` knows of it.

    Every lane of the tile keeps its own maximum, sum and accumulator, so nothing is exchanged between warps before the end.
    Keys and values but those of `opening` leave the cache first, to what is read again soon, scores above all. The next tile's
    keys and values are under way while this one is used, and the block ids of the one after it.
    """
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    lane = first + tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    query = tl.load(q + d).to(tl.float32) * scale
    at = keys + key_offsets(ahead[0], lane, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + d[None, :]
    if EARLY:
        _, next_block, settled, k, v = ahead
        new = ((lane >= settled) & (lane < end))[:, None]
        k = tl.load(at, mask=new, other=k, eviction_policy="evict_first")
        v = tl.load(at + VALUES, mask=new, other=v, eviction_policy="evict_first")
    else:
        _, next_block = ahead
        k = tl.load(at, mask=(lane < end)[:, None], other=0.0, eviction_policy="evict_first")
        v = tl.load(at + VALUES, mask=(lane < end)[:, None], other=0.0, eviction_policy="evict_first")
    block = next_block
    top = tl.full((TILE,), FLOOR, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, HEAD_DIM), tl.float32)
    for start in range(first, end, TILE):
        lane = start + tl.arange(0, TILE)
        after = lane + TILE
        at = keys + key_offsets(block, after, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + d[None, :]
        next_k = tl.load(at, mask=(after < end)[:, None], other=0.0, eviction_policy="evict_first")
        next_v = tl.load(at + VALUES, mask=(after < end)[:, None], other=0.0, eviction_policy="evict_first")
        block = tl.load(table + (after + TILE) // BLOCK_SIZE, mask=after + TILE < end, other=0)
        score = tl.where(lane < end, tl.sum(k.to(tl.float32) * query[None, :], 1), float("-inf"))
        if SCORES:
            tl.store(scores + lane, ranked(score), mask=lane < end)
        new_top = tl.maximum(top, score)
        weight = tl.exp(score - new_top)
        keep = tl.exp(top - new_top)
        total = total * keep + weight
        acc = acc * keep[:, None] + weight[:, None] * v.to(tl.float32)
        top, k, v = new_top, next_k, next_v
    maximum = tl.max(top, 0)
    share = tl.exp(top - maximum)
    return tl.sum(acc * share[:, None], 0), maximum, tl.sum(total * share, 0)


@triton.jit
def weigh(weight, v, acc):
    """`weight @ v` added to `acc`. Half-width values meet the weights as two terms, which together keep 16 bits or more."""
    if v.dtype == tl.float32:
        acc = tl.dot(weight, v, acc, input_precision="ieee")
    else:
        high = weight.to(v.dtype)
        low = (weight - high.to(tl.float32)).to(v.dtype)
        acc = tl.dot(low, v, tl.dot(high, v, acc))
    return acc


@triton.jit
def grouped_heads(
    q, keys, table, scores, first, end, block_stride, scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """The query heads of one kv head together, padded to a dot's 16 rows: keys and values are read once for all."""
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    d = tl.arange(0, HEAD_DIM)
    head = tl.arange(0, GROUP_TILE)
    query = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=(head < GROUP)[:, None], other=0.0)
    top = tl.full((GROUP_TILE,), FLOOR, tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    acc = tl.zeros((GROUP_TILE, HEAD_DIM), tl.float32)
    for start in range(first, end, TILE):
        lane = start + tl.arange(0, TILE)
        inside = lane < end
        block = tl.load(table + lane // BLOCK_SIZE, mask=inside, other=0)
        at = keys + key_offsets(block, lane, block_stride, BLOCK_SIZE, HEAD_DIM)[:, None] + d[None, :]
        k = tl.load(at, mask=inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        if SCORES:
            to = scores + head[:, None] * SCORES + lane[None, :]
            tl.store(to, ranked(score), mask=(head < GROUP)[:, None] & inside[None, :])
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - new_top[:, None])
        keep = tl.exp(top - new_top)
        total = total * keep + tl.sum(weight, 1)
        v = tl.load(at + VALUES, mask=inside[:, None], other=0.0)
        acc = weigh(weight, v, acc * keep[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def attend(
    opened, kv_head, q, partial, sums, scores, block_stride, scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
    SCORES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One split of one kv head, as `opening` gives it. `scores` has SCORES elements a head and is given the scores; with 0 it
    is not touched."""
    row, index, keys, table, first, end, ahead = opened
    of_group = tl.arange(0, GROUP_TILE)
    head = (tl.maximum(row, 0).to(tl.int64) * KV_HEADS + kv_head) * GROUP
    if SCORES:
        scores += head * SCORES
    if GROUP == 1:
        acc, top, total = single_head(
            q + head * HEAD_DIM, ahead, keys, table, scores, first, end, block_stride, scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            TILE, SCORES, EARLY,
        )  # fmt: skip
        acc = acc[None, :]
    else:
        acc, top, total = grouped_heads(
            q + head * HEAD_DIM, keys, table, scores, first, end, block_stride, scale, KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM,
            BLOCK_SIZE, TILE, SCORES,
        )  # fmt: skip
    if row >= 0:
        real = of_group < GROUP
        at = (head + of_group) * MOST + index
        tl.store(partial + at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], acc, mask=real[:, None])
        tl.store(sums + at * 2, top, mask=real)
        tl.store(sums + at * 2 + 1, total, mask=real)


@triton.jit
def attend_all(
    splits, q, block_tables, kv, partial, sums, scores, plane_stride, block_stride, layer, scale, LIMIT: tl.constexpr,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, SCORES: tl.constexpr,
    EARLY: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """This program's share of the LIMIT (split, kv head) pairs, one after another; with LIMIT 0 each has its own program. If
    EARLY, keys and values of a single head are asked for before the wait as well."""
    ASKED: tl.constexpr = EARLY and GROUP == 1
    at = tl.program_id(0)
    # The first is worked through whatever it is, so that nothing waits for its row.
    opened = opening(
        splits, at, block_tables, kv, plane_stride, block_stride, layer, LAYERS, KV_HEADS, GROUP, HEAD_DIM, TABLE_WIDTH,
        BLOCK_SIZE, TILE, ASKED,
    )  # fmt: skip
    wait(PROGRAMMATIC)
    if LIMIT == 0:
        attend(
            opened, at % KV_HEADS, q, partial, sums, scores, block_stride, scale, KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM,
            BLOCK_SIZE, MOST, TILE, SCORES, ASKED,
        )  # fmt: skip
    else:
        share = at >= 0
        while share:
            after = at + tl.num_programs(0)
            share = tl.load(splits + after // KV_HEADS * (8 + TILE), mask=after < LIMIT, other=-1) >= 0
            attend(
                opened, at % KV_HEADS, q, partial, sums, scores, block_stride, scale, KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM,
                BLOCK_SIZE, MOST, TILE, SCORES, ASKED,
            )  # fmt: skip
            at = after
            if share:
                opened = opening(
                    splits, at, block_tables, kv, plane_stride, block_stride, layer, LAYERS, KV_HEADS, GROUP, HEAD_DIM,
                    TABLE_WIDTH, BLOCK_SIZE, TILE, ASKED,
                )  # fmt: skip


@triton.jit
def attention_decode(
    splits, q, block_tables, kv, partial, sums, plane_stride, block_stride, layer, scale, LIMIT: tl.constexpr,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    attend_all(
        splits, q, block_tables, kv, partial, sums, None, plane_stride, block_stride, layer, scale, LIMIT, LAYERS, KV_HEADS,
        GROUP, GROUP_TILE, HEAD_DIM, TABLE_WIDTH, BLOCK_SIZE, MOST, TILE, 0, True, PROGRAMMATIC,
    )  # fmt: skip
