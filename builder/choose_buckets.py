"""The bucket set that wastes the least work on steps of known shapes: the exact optimum, by dynamic programming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import UsageError
from ouro_build.builder.predict import Shape

Ints = NDArray[np.int64]
Rank = tuple[int, int, int, tuple[int, ...]]
"""Wasted rows, replays, number of buckets, buckets: the least is the best."""
_MOST = 1 << 62
_STRIDE = 24
"""Of so many sizes one is held against every size below it: about what costs least for a thousand sizes."""


def choose_buckets(steps: Mapping[Shape, int], count: int, largest: int) -> tuple[int, ...]:
    """At most `count` buckets, none above `largest`, that waste the fewest rows on `steps`; of equal ones the best by `Rank`.

    Raises UsageError if there are no steps, or more than could be counted exactly.
    """
    demand = _demand(steps, largest)
    rows = np.array(sorted(demand), np.int64)
    weights = np.array([demand[size] for size in sorted(demand)], np.int64)
    tops = [_below(rows, weights, top, count) for top in range(1, min(largest, max(demand)) + 1)]
    best: Rank | None = None
    for top in sorted(tops, key=lambda top: (top.bound, top.replays)):
        if best is not None and (top.bound, top.replays) > best[:2]:
            break
        layers = _layers(top, count)
        wasted = top.split + int(layers[-1][-1])
        if best is None or (wasted, top.replays) <= best[:2]:
            buckets = _picked(top, layers)
            found = wasted, top.replays, len(buckets), buckets
            best = found if best is None else min(best, found)
    return best[3] if best is not None else ()


class _Top(NamedTuple):
    """What steps come down to where a given size is the largest bucket.

    A step above it is split, and the last replay of a split is padded like any batch of its size: so there are loops of the
    ascending `sizes`, of which that bucket is the last, and how many of each is `weights`. Between two of them a bucket is no
    better than at the lower one. `split` rows are in split steps and `replays` are made whatever the other buckets are;
    `bound` is less than or equal to the rows wasted.
    """

    sizes: Ints
    weights: Ints
    split: int
    replays: int
    bound: int

    @property
    def before(self) -> tuple[Ints, Ints]:
        """Loops, and rows, of the first j sizes; a value for every j."""
        return _sums(self.weights), _sums(self.weights * self.sizes)


def _demand(steps: Mapping[Shape, int], largest: int) -> Counter[int]:
    """Loops run at each number of live rows."""
    demand: Counter[int] = Counter()
    for (rows, loops), count in steps.items():
        demand[rows] += loops * count
    demand = +demand
    if not demand:
        raise UsageError("no decode step is recorded", hint="Record a load: ouro-worker run … --coverage-out C.json")
    if sum(weight * (rows + largest) for rows, weight in demand.items()) >= _MOST:
        raise UsageError("more rows than a worker can have run", where="steps", hint="The record is damaged: record it again.")
    return demand


def _below(rows: Ints, weights: Ints, top: int, count: int) -> _Top:
    """What `weights` loops of `rows` rows come down to with at most `count` buckets, the largest of them `top`."""
    loops = np.zeros(top + 1, np.int64)
    np.add.at(loops, np.where(rows <= top, rows, rows % top), weights)
    loops[0] = 0  # of no remainder
    sizes = np.union1d(np.flatnonzero(loops), [top])
    split = int((rows * weights)[rows > top].sum())
    # A size that is no bucket is padded to the next one at least.
    pads = np.sort(loops[sizes[:-1]] * np.diff(sizes))
    bound = split + int(pads[: max(0, len(sizes) - count)].sum())
    return _Top(sizes, loops[sizes], split, int((-(-rows // top) * weights).sum()), bound)


def _sums(values: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])


def _layers(top: _Top, count: int) -> list[Ints]:
    """The least padded rows of the first j sizes with 1, 2, … buckets, the last of which is size j - 1; a value for every j.

    Of layer k only those from j = k on mean anything. There are `count` layers, or one a size if there are fewer: every bucket
    saves something, since all loops but those of the last size are more than none.

    A bucket at size j - 1 that serves the sizes i … j - 1 pads ends[j] · (total[j] - total[i]) - (filled[j] - filled[i]) rows.
    Only -ends[j] · total[i] depends on both, and both factors grow, so the best i grows with j (the quadrangle inequality).
    For i ≥ j the same expression adds to a layer before, which is worse at i than this one at j: no i need be kept from a j.
    """
    total, filled = top.before
    ends = np.concatenate([[0], top.sizes])
    whole = ends * total - filled
    layers = [whole]
    for k in range(2, min(count, len(top.sizes)) + 1):
        least = np.full(len(ends), _MOST, np.int64)
        least[k:] = whole[k:] + _least_lines((layers[-1] + filled)[k - 1 :], total[k - 1 :], ends[k:])
        layers.append(least)
    return layers


def _least_lines(heights: Ints, slopes: Ints, at: Ints) -> Ints:
    """For every j the least heights[i] - slopes[i] · at[j]. `slopes` and `at` ascend, and so does the first best i."""
    coarse = np.arange(0, len(at), _STRIDE)
    first = (heights - slopes * at[coarse, None]).argmin(1)
    low = np.repeat(first, _STRIDE)[: len(at)]
    high = np.repeat(np.append(first[1:], len(heights) - 1), _STRIDE)[: len(at)]
    widths = high - low + 1
    starts = np.cumsum(widths) - widths
    tried = np.arange(starts[-1] + widths[-1]) + np.repeat(low - starts, widths)
    return np.minimum.reduceat(heights[tried] - slopes[tried] * np.repeat(at, widths), starts)


def _picked(top: _Top, layers: list[Ints]) -> tuple[int, ...]:
    """The buckets by which the last size of the last layer came about."""
    total, filled = top.before
    picked, at = [int(top.sizes[-1])], len(top.sizes)
    for k in range(len(layers) - 1, 0, -1):
        through = layers[k - 1][k:at] - picked[0] * total[k:at] + filled[k:at]
        at = k + int(through.argmin())
        picked.insert(0, int(top.sizes[at - 1]))
    return tuple(picked)
