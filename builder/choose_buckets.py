"""The bucket set that wastes the least work on steps of known shapes: the exact optimum, by dynamic programming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.builder.predict import Shape, predict

Rank = tuple[int, int, int, tuple[int, ...]]
"""Wasted rows, replays, number of buckets, buckets: the least is the best."""
_MOST = 1 << 62


def rank(steps: Mapping[Shape, int], buckets: tuple[int, ...]) -> Rank:
    """How good `buckets` are for `steps`: fewest wasted rows, then fewest replays, then fewest and smallest buckets."""
    outcome = predict(steps, buckets)
    return outcome.wasted_rows, outcome.replays, len(buckets), buckets


def choose_buckets(steps: Mapping[Shape, int], count: int, largest: int) -> tuple[int, ...]:
    """At most `count` buckets, none above `largest`, that waste the fewest rows on `steps`; of equal ones the best by `rank`.

    Raises ArtifactError if there are no steps, or more than could be counted exactly.
    """
    demand = _demand(steps, largest)
    best: tuple[Rank, tuple[int, ...]] | None = None
    for top in range(min(largest, max(demand)), 0, -1):
        # What exceeds the top bucket is split whatever the others are. This only grows from here on.
        split = sum(rows * weight for rows, weight in demand.items() if rows > top)
        if best is not None and split > best[0][0]:
            break
        buckets = _choose_below(demand, count, top)
        found = rank(steps, buckets)
        if best is None or found < best[0]:
            best = found, buckets
    return best[1] if best is not None else ()


def _demand(steps: Mapping[Shape, int], largest: int) -> Counter[int]:
    """Loops run at each number of live rows."""
    demand: Counter[int] = Counter()
    for (rows, loops), count in steps.items():
        demand[rows] += loops * count
    demand = +demand
    if not demand:
        raise ArtifactError("no decode step is recorded", hint="Record a load: ouro-worker run … --coverage-out C.json")
    if sum(weight * (rows + largest) for rows, weight in demand.items()) >= _MOST:
        raise ArtifactError(
            "more rows than a worker can have run", where="steps", hint="The record is damaged: record it again."
        )
    return demand


def _choose_below(demand: Mapping[int, int], count: int, top: int) -> tuple[int, ...]:
    """The fewest of at most `count` buckets, the largest of them `top`, that pad the fewest rows.

    A split's last replay is padded like any batch of its size, so every step comes down to one size of at most `top`.
    Between two sizes that occur a bucket is no better than at the lower one: only those, and `top`, are candidates.
    """
    residual: Counter[int] = Counter()
    for rows, weight in demand.items():
        residual[rows if rows <= top else rows % top] += weight
    sizes = sorted({*(s for s in residual if s), top})
    if count >= len(sizes):
        return tuple(sizes)
    return _partition(np.array(sizes, np.int64), np.array([residual[s] for s in sizes], np.int64), count)


def _partition(sizes: NDArray[np.int64], weights: NDArray[np.int64], count: int) -> tuple[int, ...]:
    """The fewest of at most `count` of `sizes`, the last among them, where padding every size to the next costs the least.

    After step k, `least[j]` is the least cost of the first j sizes with k buckets, the last of which is size j - 1;
    `chosen[k][j]` the number of sizes below that bucket's own.
    """
    total = np.concatenate([[0], np.cumsum(weights)])
    filled = np.concatenate([[0], np.cumsum(weights * sizes)])
    # cost[j, i]: a bucket at size j - 1 that serves the sizes i … j - 1.
    ends = np.concatenate([[0], sizes])[:, None]
    cost = ends * (total[:, None] - total[None, :]) - (filled[:, None] - filled[None, :])
    cost[np.triu_indices(len(total))] = _MOST
    least = np.full(len(total), _MOST, np.int64)
    least[0] = 0
    chosen: list[NDArray[np.int64]] = []
    best, best_count = _MOST, 0
    for k in range(count):
        through = np.minimum(least, _MOST - cost) + cost  # saturates where there is no way
        before = through.argmin(1)
        least = through[np.arange(len(total)), before]
        chosen.append(before)
        if least[-1] < best:
            best, best_count = int(least[-1]), k + 1
    picked, at = [], len(sizes)
    for before in reversed(chosen[:best_count]):
        picked.append(int(sizes[at - 1]))
        at = int(before[at])
    return tuple(reversed(picked))
