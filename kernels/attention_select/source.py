"""Triton source of `attention_select`: one program a (row, head), whose scores stay in the caches over all passes."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.references.source import slot_of

# Before every score's place.
LEAST = tl.constexpr(-0x80000000)


@triton.jit
def score_at(place):
    """The score at an int32 place in the order of float32 values. Below -inf there is -inf, above inf what nothing reaches."""
    score = tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)
    return tl.where(place < -0x7F800001, float("-inf"), score)


@triton.jit
def count_from(scores, n, least, TILE: tl.constexpr):
    """How many of `n` scores are at least `least`."""
    lane = tl.arange(0, TILE)
    counts = tl.zeros((TILE,), tl.int32)
    for start in range(0, n, TILE):
        score = tl.load(scores + start + lane, mask=start + lane < n, other=float("-inf"))
        counts += (score >= least).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def threshold_of(scores, n, k, SCORES: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr):
    """(threshold, exact, ties): the `k` largest scores are those from the threshold on, if that is `exact`; else those above it
    and the first `ties` of those equal to it.

    A bit of the place of the k-th a pass, from the highest; it ends early where a threshold parts exactly k from the others.
    HELD: all `n` scores fit a tile and are read once; else in every pass.
    """
    if HELD:
        lane = tl.arange(0, TILE)
        # What lies past n is read and put aside: bounds known in advance leave whole vectors to be loaded.
        held = tl.where(lane < n, tl.load(scores + lane, mask=lane < SCORES, other=float("-inf")), float("-inf"))
    threshold = n * 0 + LEAST
    found = n
    above = n * 0
    shift = n * 0 + 31
    while (shift >= 0) & (found != k):
        higher = threshold ^ ((n * 0 + 1) << shift)
        least = score_at(higher)
        count = tl.sum((held >= least).to(tl.int32), 0) if HELD else count_from(scores, n, least, TILE)
        enough = count >= k
        above = tl.where(enough, above, count)
        found = tl.where(enough, count, found)
        threshold = tl.where(enough, higher, threshold)
        shift -= 1
    return score_at(threshold), found == k, k - above


@triton.jit
def write_above(scores, keys, n, threshold, top, TILE: tl.constexpr):
    """The places of all scores from `threshold` on, in ascending order; returns a lane's sum of exp(score - top) over them."""
    lane = tl.arange(0, TILE)
    mass = tl.zeros((TILE,), tl.float32)
    first = n * 0
    score = tl.load(scores + lane, mask=lane < n, other=0.0)
    for start in range(0, n, TILE):
        at = start + lane
        later = tl.load(scores + at + TILE, mask=at + TILE < n, other=0.0)
        chosen = (at < n) & (score >= threshold)
        one = chosen.to(tl.int32)
        tl.store(keys + first + tl.cumsum(one, 0) - one, at, mask=chosen)
        mass += tl.where(chosen, tl.exp(score - top), 0.0)
        first += tl.sum(one, 0)
        score = later
    return mass


@triton.jit
def write_with_ties(scores, keys, n, k, threshold, ties, top, TILE: tl.constexpr):
    """As `write_above`, of the scores above `threshold` and the first `ties` of those equal to it, `k` in all."""
    lane = tl.arange(0, TILE)
    mass = tl.zeros((TILE,), tl.float32)
    first = n * 0
    tied = n * 0
    for start in range(0, n, TILE):
        at = start + lane
        score = tl.load(scores + at, mask=at < n, other=0.0)
        higher = (at < n) & (score > threshold)
        equal = (at < n) & (score == threshold)
        # One scan for both counts.
        both = tl.cumsum(higher.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        higher_before = (both & 0xFFFF) - higher.to(tl.int32)
        equal_before = tied + (both >> 16) - equal.to(tl.int32)
        chosen = higher | (equal & (equal_before < ties))
        index = first + higher_before + tl.minimum(equal_before, ties)
        tl.store(keys + index, at, mask=chosen & (index < k))
        mass += tl.where(chosen, tl.exp(score - top), 0.0)
        last = tl.sum(higher.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        first += last & 0xFFFF
        tied += last >> 16
    return mass


@triton.jit
def attention_select(
    rows, counts, scores, sums, out, retained_counts, reference_records, reference_mass, reference_keys, reference_output,
    layer, SLOTS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    SCORES: tl.constexpr, MOST: tl.constexpr, SPLIT_TILE: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = slot_of(rows + row * 8, SLOTS)
    if slot >= 0:
        n = tl.load(rows + row * 8 + 1) + 1
        k = tl.load(retained_counts + n)
        row_head = row.to(tl.int64) * HEADS + head
        slot_layer = slot.to(tl.int64) * LAYERS + layer
        place = slot_layer * HEADS + head
        scores += row_head * SCORES
        split = tl.arange(0, SPLIT_TILE)
        written = split < tl.load(counts + row)
        sums_at = sums + (row_head * MOST + split) * 2
        maximum = tl.load(sums_at, mask=written, other=float("-inf"))
        total = tl.load(sums_at + 1, mask=written, other=0.0)
        top = tl.max(maximum, 0)
        total = tl.sum(total * tl.exp(maximum - top), 0)

        if n <= HELD // 4:
            threshold, exact, ties = threshold_of(scores, n, k, SCORES, HELD // 4, True)
        elif n <= HELD // 2:
            threshold, exact, ties = threshold_of(scores, n, k, SCORES, HELD // 2, True)
        elif n <= HELD:
            threshold, exact, ties = threshold_of(scores, n, k, SCORES, HELD, True)
        else:
            threshold, exact, ties = threshold_of(scores, n, k, SCORES, HELD // 4, False)
        keys = reference_keys + place * CAPACITY
        if exact:
            mass = write_above(scores, keys, n, threshold, top, TILE)
        else:
            mass = write_with_ties(scores, keys, n, k, threshold, ties, top, TILE)
        tl.store(reference_mass + place, tl.sum(mass, 0) / total)
        d = tl.arange(0, HEAD_DIM)
        tl.store(reference_output + place * HEAD_DIM + d, tl.load(out + row_head * HEAD_DIM + d).to(tl.float32))
        if head == 0:
            tl.store(reference_records + slot_layer * 2, tl.load(rows + row * 8 + 6))
            tl.store(reference_records + slot_layer * 2 + 1, k)
