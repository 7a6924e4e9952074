"""What an engine was asked and has done: plain counters, for whoever reads them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

# Bounds in seconds as vLLM has them, so that its dashboards' quantiles mean the same here.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
               160.0, 640.0, 2560.0)  # fmt: skip
# vLLM starts at 0.01. A step of this model takes less.
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                  20.0, 40.0, 80.0)  # fmt: skip
REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
           7680.0)  # fmt: skip


class Histogram:
    """Seconds by ranges that end at `bounds`, ascending; each belongs to its range. `counts` has one more, for the rest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one that took `seconds`."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Traffic:
    """Requests and tokens of an engine. The engine counts; any thread may read the attributes meanwhile.

    `waiting` and `running` requests are those of now, `kv_used` of `kv_blocks` KV blocks too; the rest only grows.
    """

    def __init__(self) -> None:
        self.waiting = self.running = 0
        self.kv_blocks = self.kv_used = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self.first_token = Histogram(FIRST_TOKEN)
        self.between_tokens = Histogram(BETWEEN_TOKENS)
        self.request = Histogram(REQUEST)

    def arrived(self) -> float:
        """A request was queued: the time of it, on the monotonic clock."""
        self.waiting += 1
        return time.monotonic()

    def admitted(self, blocks: int) -> None:
        """A queued request now runs, with so many KV blocks."""
        self.waiting -= 1
        self.running += 1
        self.kv_used += blocks

    def token(self, now: float, arrived: float, last: float) -> None:
        """A request that `arrived` then has a token `now`; `last` is the time of the one before, 0 if it is the first."""
        self.generated_tokens += 1
        if last:
            self.between_tokens.observe(now - last)
        else:
            self.first_token.observe(now - arrived)

    def done(self, reason: str, seconds: float, blocks: int) -> None:
        """A running request ended for `reason`, `seconds` after it arrived, and gave its KV blocks back."""
        self.running -= 1
        self.kv_used -= blocks
        self.finished[reason] += 1
        self.request.observe(seconds)

    def lost(self) -> None:
        """No request is left, though none finished: the device failed, or all were withdrawn."""
        self.waiting = self.running = self.kv_used = 0
