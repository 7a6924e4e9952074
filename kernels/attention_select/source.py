"""Triton source of `attention_select`: one program a (row, head), whose scores stay in the caches over all passes."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.references.source import slot_of

# Before every score's place.
LEAST = tl.constexpr(-0x80000000)
# Passes that look where the k-th score should be. Where scores are like no known distribution the others find it.
GUESSES = tl.constexpr(10)


@triton.jit
def joined(sums, count, SPLIT_TILE: tl.constexpr):
    """(M, total): the largest score of a head, and the sum of exp(score - M) over all of them, from those of its splits."""
    split = tl.arange(0, SPLIT_TILE)
    written = split < tl.load(count)
    maximum = tl.load(sums + split * 2, mask=written, other=float("-inf"))
    total = tl.load(sums + split * 2 + 1, mask=written, other=0.0)
    top = tl.max(maximum, 0)
    return top, tl.sum(total * tl.exp(maximum - top), 0)


@triton.jit
def score_at(place):
    """The score at an int32 place in the order of float32 values. Below -inf there is -inf, above inf what nothing reaches."""
    score = tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)
    return tl.where(place < -0x7F800001, float("-inf"), score)


@triton.jit
def place_of(score):
    """The place of a score: `score_at` of it is the score."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


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
def normal_quantile(above):
    """Where a standard normal distribution leaves the share `above` of it: Abramowitz and Stegun, 26.2.22, within 0.003."""
    t = tl.sqrt(-2.0 * tl.log(tl.minimum(above, 1.0 - above)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + (0.99229 + 0.04481 * t) * t)
    return tl.where(above <= 0.5, z, -z)


@triton.jit
def guess_of(scores, n, k, SAMPLE: tl.constexpr):
    """Where the `k`-th score of `n` would lie if they had a normal distribution, from a sample of them, and a first step from
    there, an eighth of their deviation."""
    score = tl.load(scores + (tl.arange(0, SAMPLE).to(tl.int64) * n // SAMPLE))
    score = tl.where(score > float("-inf"), score, 0.0)
    mean = tl.sum(score, 0) / SAMPLE
    deviation = tl.sqrt(tl.maximum(tl.sum(score * score, 0) / SAMPLE - mean * mean, 0.0))
    return mean + normal_quantile(k / n) * deviation, deviation * 0.125


@triton.jit
def threshold_of(scores, n, k, top, guess, step, SCORES: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr):
    """(threshold, exact, ties): the `k` largest scores are those from the threshold on, if that is `exact`; else those above it
    and the first `ties` of those equal to it. `top` is the largest, `guess` where the k-th may be, within a few times `step`.

    The place of the k-th lies between two, of which counts say so; a pass counts the scores from a place between them. The
    first passes go to the guess, then on by growing steps until it is enclosed, then by proportion, a little towards the end
    that is farther away, so that both come nearer; the others halve. It ends where a place parts exactly k from the others:
    soon where scores are spread smoothly, up to GUESSES later than by halving alone where they lie in heaps.
    HELD: all `n` scores fit a tile and are read once; else in every pass.
    """
    if HELD:
        lane = tl.arange(0, TILE)
        # What lies past n is read and put aside: bounds known in advance leave whole vectors to be loaded.
        held = tl.where(lane < n, tl.load(scores + lane, mask=lane < SCORES, other=float("-inf")), float("-inf"))
    low, from_low = n * 0 + LEAST, n
    high, from_high = place_of(top) + 1, n * 0
    left = n * 0 + GUESSES
    while (from_low != k) & (low + 1 < high):
        place = place_of(guess)
        if left <= 0:
            place = (low >> 1) + (high >> 1) + (low & high & 1)
        place = tl.minimum(tl.maximum(place, low + 1), high - 1)
        least = score_at(place)
        count = tl.sum((held >= least).to(tl.int32), 0) if HELD else count_from(scores, n, least, TILE)
        enough = count >= k
        low = tl.where(enough, place, low)
        from_low = tl.where(enough, count, from_low)
        high = tl.where(enough, high, place)
        from_high = tl.where(enough, from_high, count)
        if from_high == 0:
            guess = least + step
        elif low == LEAST:
            guess = least - step
        else:
            between = (from_low - from_high).to(tl.float32)
            aside = tl.where(between < 8, 0.0, tl.sqrt(between) * 0.5)
            missed = (from_low - k).to(tl.float32)
            missed += tl.where(missed * 2 > between, -aside, aside)
            guess = score_at(low) + (score_at(high) - score_at(low)) * (missed / between)
        step *= 4.0
        left -= 1
    return score_at(low), from_low == k, k - from_high


@triton.jit
def by_fours(x, TILE: tl.constexpr):
    """Sums of four neighbours each: those that a thread holds, so that it keeps one sum in the place of four."""
    return tl.sum(tl.reshape(x, (TILE // 4, 4)), 1)


@triton.jit
def write_above(scores, keys, n, threshold, top, TILE: tl.constexpr):
    """The places of all scores from `threshold` on, in ascending order; returns sums of exp(score - top) over them."""
    lane = tl.arange(0, TILE)
    mass = tl.zeros((TILE // 4,), tl.float32)
    first = n * 0
    score = tl.load(scores + lane, mask=lane < n, other=0.0)
    for start in range(0, n, TILE):
        at = start + lane
        later = tl.load(scores + at + TILE, mask=at + TILE < n, other=0.0)
        chosen = (at < n) & (score >= threshold)
        one = chosen.to(tl.int32)
        tl.store(keys + first + tl.cumsum(one, 0) - one, at, mask=chosen)
        mass += by_fours(tl.where(chosen, tl.exp(score - top), 0.0), TILE)
        first += tl.sum(one, 0)
        score = later
    return mass


@triton.jit
def write_with_ties(scores, keys, n, k, threshold, ties, top, TILE: tl.constexpr):
    """As `write_above`, of the scores above `threshold` and the first `ties` of those equal to it, `k` in all."""
    lane = tl.arange(0, TILE)
    mass = tl.zeros((TILE // 4,), tl.float32)
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
        mass += by_fours(tl.where(chosen, tl.exp(score - top), 0.0), TILE)
        last = tl.sum(higher.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        first += last & 0xFFFF
        tied += last >> 16
    return mass


@triton.jit
def attention_select(
    rows, counts, scores, sums, retained_counts, reference_records, reference_mass, reference_keys, layer,
    SLOTS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, CAPACITY: tl.constexpr, SCORES: tl.constexpr,
    MOST: tl.constexpr, SPLIT_TILE: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0)
    head = tl.program_id(1)
    record = rows + row * 8
    row_head = row.to(tl.int64) * HEADS + head
    scores += row_head * SCORES
    if slot_of(record, SLOTS) >= 0:
        n = tl.load(record + 1) + 1
        k = tl.load(retained_counts + n)
        top, total = joined(sums + row_head * MOST * 2, counts + row, SPLIT_TILE)
        # A quotient is one value to hold over the search; the last step of the total's sum would be put off until after it.
        share = 1.0 / total
        guess, step = guess_of(scores, n, k, TILE // 4)
        if n <= HELD // 4:
            threshold, exact, ties = threshold_of(scores, n, k, top, guess, step, SCORES, HELD // 4, True)
        elif n <= HELD // 2:
            threshold, exact, ties = threshold_of(scores, n, k, top, guess, step, SCORES, HELD // 2, True)
        elif n <= HELD:
            threshold, exact, ties = threshold_of(scores, n, k, top, guess, step, SCORES, HELD, True)
        else:
            threshold, exact, ties = threshold_of(scores, n, k, top, guess, step, SCORES, HELD // 4, False)
        # The row is asked again, from here on and once more below: held meanwhile, what it says would take registers from the
        # loops. The barrier keeps the compiler from taking the answers for those from before.
        tl.debug_barrier()
        n = tl.load(record + 1) + 1
        slot_layer = tl.load(record + 5).to(tl.int64) * LAYERS + layer
        keys = reference_keys + (slot_layer * HEADS + head) * CAPACITY
        if exact:
            mass = write_above(scores, keys, n, threshold, top, TILE)
        else:
            mass = write_with_ties(scores, keys, n, k, threshold, ties, top, TILE)
        slot_layer = tl.load(record + 5).to(tl.int64) * LAYERS + layer
        tl.store(reference_mass + slot_layer * HEADS + head, tl.sum(mass, 0) * share)
        if head == 0:
            tl.store(reference_records + slot_layer * 2, tl.load(record + 6))
            tl.store(reference_records + slot_layer * 2 + 1, k)
