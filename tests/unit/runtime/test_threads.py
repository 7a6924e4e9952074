"""Numbered work on threads: all of it once, and the failure of the lowest number."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.runtime import threads
from ouro_build.runtime.threads import Workers, spare_cores


@given(st.integers(0, 40), st.integers(1, 5))
def test_all_is_done_once_and_the_end_is_told_once(count: int, most: int) -> None:
    done: Counter[int] = Counter()
    ends: list[int] = []
    workers = Workers(lambda i: done.update([i]), count, most, done=lambda: ends.append(sum(done.values())))
    workers.wait()
    assert done == Counter(range(count))
    assert ends == ([count] if count else [])


@given(st.integers(1, 30), st.sets(st.integers(0, 29), min_size=1), st.integers(1, 4))
def test_the_failure_of_the_lowest_number_is_raised(count: int, bad: set[int], most: int) -> None:
    seen: list[int] = []

    def work(i: int) -> None:
        seen.append(i)
        if i in bad:
            raise ValueError(i)

    workers = Workers(work, count, most)
    failed = [i for i in sorted(bad) if i < count]
    if failed:
        with pytest.raises(ValueError, match=f"^{failed[0]}$"):
            workers.wait()
        assert most > 1 or seen == list(range(failed[0] + 1)), "no more was begun"
    else:
        workers.wait()


def test_each_thread_starts_first_and_its_failure_counts() -> None:
    started: list[str] = []
    Workers(lambda i: None, 8, 3, start=lambda: started.append(threading.current_thread().name)).wait()
    assert len(started) == 3

    def fail() -> None:
        raise RuntimeError("no context")

    with pytest.raises(RuntimeError, match="no context"):
        Workers(lambda i: None, 8, 3, start=fail).wait()


def test_stopping_waits_for_what_was_begun() -> None:
    began, ended = threading.Event(), threading.Event()

    def work(i: int) -> None:
        began.set()
        time.sleep(0.02)
        ended.set()

    workers = Workers(work, 1000, 1)
    began.wait()
    workers.stop()
    assert ended.is_set()
    workers.wait()


@pytest.mark.parametrize(("cores", "threads_"), [(1, 1), (2, 1), (16, 15), (128, 32)])
def test_a_core_is_left_for_the_caller(monkeypatch: pytest.MonkeyPatch, cores: int, threads_: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert spare_cores() == threads_
    assert threads.MOST == 32
