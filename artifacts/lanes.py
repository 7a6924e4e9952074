"""Work on several threads that keeps its order: ahead of its use, or behind it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def thread_count() -> int:
    """Threads worth starting for work that waits on memory: one a core, at most 8."""
    return min(8, os.cpu_count() or 1)


def ordered_map(work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """`work` of each item, in order, done by several threads for up to `ahead` items before they are asked for."""
    with ThreadPoolExecutor(thread_count()) as threads:
        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(threads.submit(work, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class Lanes:
    """Threads side by side; what is put in one lane is done in order. `put` waits when too much is pending."""

    def __init__(self, count: int, backlog: int) -> None:
        self._lanes = [ThreadPoolExecutor(1) for _ in range(count)]
        self._pending: deque[Future[None]] = deque()
        self._backlog = backlog

    def put(self, lane: int, work: Callable[[], None]) -> None:
        """Do `work` after what is in the lane; `lane` counts round. Raises what earlier work raised."""
        self._pending.append(self._lanes[lane % len(self._lanes)].submit(work))
        while len(self._pending) > self._backlog:
            self._pending.popleft().result()

    def wait(self) -> None:
        """Until nothing is pending. Raises what the work raised."""
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for lane in self._lanes:
            lane.shutdown(cancel_futures=True)
