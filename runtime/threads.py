"""Numbered work on several threads: taken in order, stopped by the first failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

MOST = 32
"""Threads at most: so many hash faster than any memory here is read."""


def spare_cores(reserved: int = 1) -> int:
    """Cores that this process may use beside `reserved` ones; at least 1, at most `MOST`."""
    return max(1, min(MOST, len(os.sched_getaffinity(0)) - reserved))


class Workers:
    """`work(i)` for i in 0 … `count` - 1 on `threads` threads, each after `start()`; `done` is called when the last one ends.

    After a failure no more work is begun, and `wait` raises the failure of the lowest number.
    """

    def __init__(
        self,
        work: Callable[[int], None],
        count: int,
        threads: int,
        start: Callable[[], None] = lambda: None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._work, self._count = work, count
        self._start, self._done = start, done
        self._lock = threading.Lock()
        self._next = 0
        self._failed: tuple[int, BaseException] | None = None
        self._running = min(threads, count)
        self._threads = [threading.Thread(target=self._run, name="work") for _ in range(self._running)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait until all is done. Raises the first failure."""
        for thread in self._threads:
            thread.join()
        if self._failed is not None:
            raise self._failed[1]

    def stop(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        with self._lock:
            self._next = self._count
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        at = -1
        try:
            self._start()
            while (at := self._take()) >= 0:
                self._work(at)
        except BaseException as error:
            self._fail(at, error)
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            self._done()

    def _take(self) -> int:
        with self._lock:
            at, self._next = self._next, self._next + 1
        return at if at < self._count else -1

    def _fail(self, at: int, error: BaseException) -> None:
        with self._lock:
            self._next = self._count
            if self._failed is None or at < self._failed[0]:
                self._failed = (at, error)
