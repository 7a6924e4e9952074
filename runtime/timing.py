"""Timing what is submitted to a device: batches of runs between two synchronisations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

_RUNS = 5
_MOST_BATCHES, _LEAST_BATCHES = 20, 3
BUDGET = 2.0
"""Seconds that a measurement may take, where three batches take less."""


def run_times(run: Callable[[], object], synchronize: Callable[[], object], batches: int, runs: int) -> list[float]:
    """Seconds a run, one for each of `batches` batches of `runs` runs."""
    took = []
    for _ in range(batches):
        synchronize()
        began = time.perf_counter()
        for _ in range(runs):
            run()
        synchronize()
        took.append((time.perf_counter() - began) / runs)
    return took


def measure(run: Callable[[], object], synchronize: Callable[[], object], hopeless: float = math.inf) -> list[float]:
    """Seconds a run in each of several batches, after two runs that warm up; fewer batches where a run is slow, or where the
    fastest of the first takes longer than `hopeless` seconds."""
    slow = run_times(run, synchronize, 2, 1)[-1]
    batches = min(_MOST_BATCHES, max(_LEAST_BATCHES, int(BUDGET / (_RUNS * slow))))
    found = run_times(run, synchronize, _LEAST_BATCHES, _RUNS)
    if min(found) <= hopeless:
        found += run_times(run, synchronize, batches - _LEAST_BATCHES, _RUNS)
    return found


def percentiles(values: Sequence[float], points: Sequence[int]) -> dict[str, float]:
    """The percentiles `points` of `values`, interpolated, by their number as text."""
    found: list[float] = np.percentile(values, points).tolist()
    return {str(point): value for point, value in zip(points, found, strict=True)}


def median_ms(seconds: Sequence[float]) -> float:
    """The median of `seconds`, in milliseconds."""
    return median(seconds) * 1e3
