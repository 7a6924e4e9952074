"""Triton source of `attention_decode`: programs share the (split, kv head) pairs."""

# mypy: disable-error-code="assignment"
# (a tuple that is empty or not, by a constant)

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import acquire, release, wait
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets

# Below every score, yet finite: differences of maxima stay numbers where a lane has met no key.
FLOOR = tl.constexpr(-3.0e38)


@triton.jit
def ranked(score):
    """Scores among which a largest can be found: NaN, which has no place, becomes the least of them."""
    return tl.where(score > float("-inf"), score, float("-inf"))


@triton.jit
def eights_of(first, TILE: tl.constexpr, WARPS: tl.constexpr):
    """Where the eights of a tile begin, [eight, warp]: eight keys each, one after another in a KV block."""
    EIGHTS: tl.constexpr = TILE // (8 * WARPS)
    return first + (tl.arange(0, EIGHTS) * 8)[:, None] + (tl.arange(0, WARPS) * (8 * EIGHTS))[None, :]


@triton.jit
def keys_of(eights, LANES: tl.constexpr):
    """The keys of `eights` [eight, warp] as [eight, step, warp, lane], LANES keys a step."""
    step = (tl.arange(0, 8 // LANES) * LANES)[None, :, None, None]
    return eights[:, None, :, None] + step + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def between(key, since, end):
    """Which of `key` are `since` … `end` - 1."""
    return (key >= since) & (key < end)


@triton.jit
def in_lanes(at, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Addresses of keys or values of WIDTH elements whose eights begin at `at` [eight, warp]: [eight, step, warp, lane,
    element]."""
    step = (tl.arange(0, 8 // LANES) * (LANES * WIDTH))[None, :, None, None, None]
    lane = (tl.arange(0, LANES) * WIDTH)[None, None, None, :, None]
    return at[:, None, :, None, None] + step + lane + tl.arange(0, WIDTH)[None, None, None, None, :]


@triton.jit
def in_fragments(at, WIDTH: tl.constexpr):
    """Addresses of keys of WIDTH words in the order of `linear_few.multiply`, [eight, 16 words, warp, key, word of the 16]."""
    part = (tl.arange(0, WIDTH // 16) * 16)[None, :, None, None, None]
    key = (tl.arange(0, 8) * WIDTH)[None, None, None, :, None]
    return at[:, None, :, None, None] + part + key + tl.arange(0, 16)[None, None, None, None, :]


@triton.jit
def load_keys(
    at, eights, since, end, other, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """The keys `since` … `end` - 1 of `eights`, which begin at `at`, as `scores_of` takes them; instead of others, `other`."""
    if FRAGMENTS:
        place = in_fragments(at.to(tl.pointer_type(tl.int32)), HEAD_DIM // 2)
        key = keys_of(eights, 8)
    else:
        place = in_lanes(at, HEAD_DIM, LANES)
        key = keys_of(eights, LANES)
    there = between(key, since, end)[:, :, :, :, None]
    return tl.load(place, mask=there, other=other, eviction_policy="evict_first")


@triton.jit
def load_values(
    at, eights, since, end, other, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """As `load_keys`, values as `weighted` takes them."""
    place = in_lanes(at.to(tl.pointer_type(tl.int32)), HEAD_DIM // 2, LANES) if FRAGMENTS else in_lanes(at, HEAD_DIM, LANES)
    there = between(keys_of(eights, LANES), since, end)[:, :, :, :, None]
    return tl.load(place, mask=there, other=other, eviction_policy="evict_first")


@triton.jit
def load_query(q, HEAD_DIM: tl.constexpr, WARPS: tl.constexpr, FRAGMENTS: tl.constexpr):
    """The query as `scores_of` takes it: for tensor cores the same in all eight columns, and for every warp."""
    if FRAGMENTS:
        PARTS: tl.constexpr = HEAD_DIM // 32
        part = (tl.arange(0, PARTS) * 32)[:, None, None, None]
        same = (tl.arange(0, WARPS) * 0)[None, :, None, None] + (tl.arange(0, 8) * 0)[None, None, :, None]
        x = tl.load(q + (part + same + tl.arange(0, 32)[None, None, None, :]))
        x = x.reshape(PARTS, WARPS, 8, 4, 2, 2, 2).permute(1, 0, 4, 5, 3, 6, 2).reshape(WARPS, HEAD_DIM, 8)
    else:
        x = tl.load(q + tl.arange(0, HEAD_DIM)).to(tl.float32)[None, None, None, None, :]
    return x


@triton.jit
def halves(words, TYPE: tl.constexpr):
    """The two elements of TYPE in each word, side by side."""
    low = words.to(tl.int16).to(TYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(TYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def scores_of(
    k, query, TYPE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr,
    FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """Products of a tile's keys with the query, float32 [eight, step, warp, lane]."""
    if FRAGMENTS:
        EIGHTS: tl.constexpr = TILE // (8 * WARPS)
        a = halves(k, TYPE).reshape(EIGHTS, HEAD_DIM // 32, WARPS, 8, 4, 2, 2, 2).permute(2, 0, 3, 1, 5, 6, 4, 7)
        product = tl.max(tl.dot(a.reshape(WARPS, EIGHTS * 8, HEAD_DIM), query), 2)  # of equal columns
        score = product.reshape(WARPS, EIGHTS, 8 // LANES, LANES).permute(1, 2, 0, 3)
    else:
        score = tl.sum(k.to(tl.float32) * query, 4)
    return score


@triton.jit
def weighted(weight, v, TYPE: tl.constexpr, FRAGMENTS: tl.constexpr):
    """Sums of a tile's values by weights [eight, step, warp, lane], float32 [warp, lane, element]."""
    weight = weight[:, :, :, :, None]
    if FRAGMENTS:
        if TYPE == tl.bfloat16:  # noqa: SIM300 - the upper half of a float32
            low = (v << 16).to(tl.float32, bitcast=True)
            high = (v & -65536).to(tl.float32, bitcast=True)
        else:
            low, high = tl.split(halves(v, TYPE).to(tl.float32))
        summed = tl.join(tl.sum(tl.sum(weight * low, 0), 0), tl.sum(tl.sum(weight * high, 0), 0))
        summed = summed.reshape(summed.shape[0], summed.shape[1], 2 * summed.shape[2])
    else:
        summed = tl.sum(tl.sum(weight * v.to(tl.float32), 0), 0)
    return summed


@triton.jit
def opening(
    splits, at, block_tables, kv, plane_stride, block_stride, layer, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr, FRAGMENTS: tl.constexpr, EARLY: tl.constexpr, ACQUIRES: tl.constexpr,
):  # fmt: skip
    """What a program knows of pair `at` when it opens it: its row (-1: there is none), the split's index, where the head's keys
    and the request's blocks are, first and end; of a single head also where the keys of the first tile are, the KV blocks of
    the second, and if EARLY the settled position and of the first tile keys and values before that, which no row of the batch
    writes.

    All of the record is asked for at once. Where it is of no split, the rest of it may be anything, and there are no keys. If
    ACQUIRES, nothing has waited yet: keys and values are asked for after a load that acquires, through the L1 cache. (Past it
    they took a tenth of a millisecond more for a lone row's step.) That load comes last, as those after it wait for it.
    """
    record = splits + at // KV_HEADS * (8 + TILE // 8)
    index = tl.load(record + 1, cache_modifier=".cg")
    first = tl.load(record + 3, cache_modifier=".cg")
    end = tl.load(record + 4, cache_modifier=".cg")
    table = block_tables + tl.load(record + 5, cache_modifier=".cg").to(tl.int64) * TABLE_WIDTH
    loop = tl.load(record + 6, cache_modifier=".cg")
    keys = kv + head_offset(plane_stride, loop, layer, at % KV_HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM)
    settled = tl.load(record + 7, cache_modifier=".cg")
    if GROUP == 1:
        block = tl.load(record + 8 + eights_of(0, TILE, WARPS) // 8, cache_modifier=".cg")
    row = acquire(record, ACQUIRES)
    first = tl.where(row >= 0, first, 0)
    end = tl.where(row >= 0, end, 0)
    ahead = ()
    if GROUP == 1:
        eights = eights_of(first, TILE, WARPS)
        k_at = keys + key_offsets(block, eights, block_stride, BLOCK_SIZE, HEAD_DIM)
        if EARLY:
            settled = tl.minimum(settled, end)
            v_at = k_at + KV_HEADS * BLOCK_SIZE * HEAD_DIM
            k = load_keys(k_at, eights, first, settled, 0, HEAD_DIM, LANES, FRAGMENTS)
            v = load_values(v_at, eights, first, settled, 0, HEAD_DIM, LANES, FRAGMENTS)
        next_block = tl.load(table + (eights + TILE) // BLOCK_SIZE, mask=eights + TILE < end, other=0, cache_modifier=".cg")
        ahead = (k_at, next_block, settled, k, v) if EARLY else (k_at, next_block)
    return row, index, keys, table, first, end, ahead


@triton.jit
def single_head(
    q, ahead, keys, table, scores, first, end, block_stride, scale, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr, FRAGMENTS: tl.constexpr,
    SCORES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query head, memory-bound. `ahead` is what `opening` knows of it.

    Warps share a tile's keys by eights; if FRAGMENTS, tensor cores multiply them with the query in the order in which they were
    loaded. Every (warp, lane) keeps its own maximum, sum and accumulator, so no value goes from warp to warp before the end. A
    tile's keys are asked for when those before them have been used, values alike, and KV blocks a tile before. Keys and values
    leave the cache first, to what is read again soon, scores above all.
    """
    VALUES: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    TYPE: tl.constexpr = keys.dtype.element_ty
    eights = eights_of(first, TILE, WARPS)
    query = load_query(q, HEAD_DIM, WARPS, FRAGMENTS)
    if EARLY:
        k_at, block, settled, k, v = ahead
        if settled < end:
            k = load_keys(k_at, eights, settled, end, k, HEAD_DIM, LANES, FRAGMENTS)
            v = load_values(k_at + VALUES, eights, settled, end, v, HEAD_DIM, LANES, FRAGMENTS)
    else:
        k_at, block = ahead
        k = load_keys(k_at, eights, first, end, 0, HEAD_DIM, LANES, FRAGMENTS)
        v = load_values(k_at + VALUES, eights, first, end, 0, HEAD_DIM, LANES, FRAGMENTS)
    top = tl.full((WARPS, LANES), FLOOR, tl.float32)
    total = tl.zeros((WARPS, LANES), tl.float32)
    acc = tl.zeros((WARPS, LANES, HEAD_DIM), tl.float32)
    for start in range(first, end, TILE):
        score = scores_of(k, query, TYPE, HEAD_DIM, TILE, WARPS, LANES, FRAGMENTS) * scale
        eights = eights_of(start, TILE, WARPS)
        after = eights + TILE
        if start + TILE < end:
            at = keys + key_offsets(block, after, block_stride, BLOCK_SIZE, HEAD_DIM)
            k = load_keys(at, after, start, end, 0, HEAD_DIM, LANES, FRAGMENTS)
        key = keys_of(eights, LANES)
        if SCORES:
            tl.store(scores + key, ranked(score), mask=key < end)
        score = tl.where(key < end, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(tl.max(score, 0), 0))
        weight = tl.exp(score - new_top[None, None, :, :])
        keep = tl.exp(top - new_top)
        total = tl.fma(total, keep, tl.sum(tl.sum(weight, 0), 0))
        summed = weighted(weight, v, TYPE, FRAGMENTS)
        acc = tl.fma(acc, keep[:, :, None].broadcast_to(summed.shape), summed)
        top = new_top
        if start + TILE < end:
            at = keys + VALUES + key_offsets(block, after, block_stride, BLOCK_SIZE, HEAD_DIM)
            v = load_values(at, after, start, end, 0, HEAD_DIM, LANES, FRAGMENTS)
            block = tl.load(table + (after + TILE) // BLOCK_SIZE, mask=after + TILE < end, other=0)
    maximum = tl.max(top.reshape(WARPS * LANES), 0)
    share = tl.exp(top - maximum)
    whole = (acc * share[:, :, None]).reshape(WARPS * LANES, HEAD_DIM)
    return tl.sum(whole, 0), maximum, tl.sum((total * share).reshape(WARPS * LANES), 0)


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
    WARPS: tl.constexpr, LANES: tl.constexpr, FRAGMENTS: tl.constexpr, SCORES: tl.constexpr, EARLY: tl.constexpr,
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
            TILE, WARPS, LANES, FRAGMENTS, SCORES, EARLY,
        )  # fmt: skip
        acc = acc[None, :]
    else:
        acc, top, total = grouped_heads(
            q + head * HEAD_DIM, keys, table, scores, first, end, block_stride, scale, KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM,
            BLOCK_SIZE, TILE, SCORES,
        )  # fmt: skip
    if row >= 0:
        real = of_group < GROUP
        at = ((row * KV_HEADS + kv_head) * GROUP + of_group).to(tl.int64) * MOST + index
        tl.store(partial + at[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], acc, mask=real[:, None])
        tl.store(sums + at * 2, top, mask=real)
        tl.store(sums + at * 2 + 1, total, mask=real)


@triton.jit
def attend_all(
    splits, q, block_tables, kv, partial, sums, scores, plane_stride, block_stride, layer, scale, LIMIT: tl.constexpr,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
    LANES: tl.constexpr, FRAGMENTS: tl.constexpr, SCORES: tl.constexpr, EARLY: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """This program's share of the LIMIT (split, kv head) pairs, one after another; with LIMIT 0 each has its own program. If
    EARLY, keys and values of a single head are asked for before the wait as well."""
    ASKED: tl.constexpr = EARLY and GROUP == 1
    at = tl.program_id(0)
    # The first is worked through whatever it is, so that nothing waits for its row.
    opened = opening(
        splits, at, block_tables, kv, plane_stride, block_stride, layer, LAYERS, KV_HEADS, GROUP, HEAD_DIM, TABLE_WIDTH,
        BLOCK_SIZE, TILE, WARPS, LANES, FRAGMENTS, ASKED, ASKED and PROGRAMMATIC,
    )  # fmt: skip
    wait(PROGRAMMATIC)
    if LIMIT == 0:
        attend(
            opened, at % KV_HEADS, q, partial, sums, scores, block_stride, scale, KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM,
            BLOCK_SIZE, MOST, TILE, WARPS, LANES, FRAGMENTS, SCORES, ASKED,
        )  # fmt: skip
    else:
        share = at >= 0
        while share:
            after = at + tl.num_programs(0)
            share = tl.load(splits + after // KV_HEADS * (8 + TILE // 8), mask=after < LIMIT, other=-1) >= 0
            attend(
                opened, at % KV_HEADS, q, partial, sums, scores, block_stride, scale, KV_HEADS, GROUP, GROUP_TILE, HEAD_DIM,
                BLOCK_SIZE, MOST, TILE, WARPS, LANES, FRAGMENTS, SCORES, ASKED,
            )  # fmt: skip
            at = after
            if share:
                opened = opening(
                    splits, at, block_tables, kv, plane_stride, block_stride, layer, LAYERS, KV_HEADS, GROUP, HEAD_DIM,
                    TABLE_WIDTH, BLOCK_SIZE, TILE, WARPS, LANES, FRAGMENTS, ASKED, False,
                )  # fmt: skip


@triton.jit
def attention_decode(
    splits, q, block_tables, kv, partial, sums, plane_stride, block_stride, layer, scale, LIMIT: tl.constexpr,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr,
    LANES: tl.constexpr, FRAGMENTS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    attend_all(
        splits, q, block_tables, kv, partial, sums, None, plane_stride, block_stride, layer, scale, LIMIT, LAYERS, KV_HEADS,
        GROUP, GROUP_TILE, HEAD_DIM, TABLE_WIDTH, BLOCK_SIZE, MOST, TILE, WARPS, LANES, FRAGMENTS, 0, True, PROGRAMMATIC,
    )  # fmt: skip
