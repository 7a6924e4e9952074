"""Start-up as data: named, nested phases with seconds and bytes, from the start of the process to the first token.

Imports nothing of ours before a record is asked for: the clock starts before all else.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ouro_build.artifacts.records import StartupRecord

TIME_ZERO = "OURO_TIME_ZERO"
"""Environment variable in which a parent says when it started this process: seconds of CLOCK_MONOTONIC, as
`time.monotonic` gives them. It is taken out of the environment when it is read, so that children do not inherit it."""


def process_start() -> float:
    """When this process started, on `time.monotonic`'s clock.

    What the parent says in TIME_ZERO; else what /proc says, to a clock tick (10 ms); else now.
    """
    now = time.monotonic()
    said = os.environ.pop(TIME_ZERO, "")
    try:
        told = float(said)
    except ValueError:
        told = math.inf
    return told if 0 <= told <= now else _by_proc(now)


def _by_proc(now: float) -> float:
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0)


class OpenPhase:
    """A phase in progress; set `bytes` to what it moved."""

    def __init__(self) -> None:
        self.bytes = 0


class _Phase(NamedTuple):
    name: str
    parent: str
    began: float
    ended: float
    bytes: int
    beside: bool


class StartupClock:
    """Collects phases. `began` is the start of the process on the monotonic clock; `first` names the time until now.

    One thread opens phases inside one another by `phase`, and they follow one another; others time theirs `beside` them.
    """

    def __init__(self, began: float | None = None, first: str = "interpreter and imports") -> None:
        self._began = self._last = process_start() if began is None else began
        self._open: list[str] = []
        self._phases: list[_Phase] = []
        self._restored = (0, 0)
        self._wall: float | None = None
        self.until_now(first)

    @property
    def current(self) -> str:
        """Name of the phase that is open; empty if none is."""
        return self._open[-1] if self._open else ""

    def until_now(self, name: str) -> None:
        """Note the time since the last phase of its own ended, or since the start, as phase `name`."""
        self._note(name, "", self._last, 0)

    @contextmanager
    def phase(self, name: str) -> Iterator[OpenPhase]:
        """Time a block as phase `name`, inside the phase that is open."""
        began, parent, phase = time.monotonic(), self.current, OpenPhase()
        self._open.append(name)
        try:
            yield phase
        finally:
            self._open.pop()
            self._note(name, parent, began, phase.bytes)

    @contextmanager
    def beside(self, name: str, parent: str) -> Iterator[OpenPhase]:
        """Time a block on another thread as phase `name` of `parent`, whose other phases may overlap it."""
        began, phase = time.monotonic(), OpenPhase()
        try:
            yield phase
        finally:
            self.was_beside(name, parent, began, phase.bytes)

    def was_beside(self, name: str, parent: str, began: float, moved: int) -> None:
        """Note what other threads did from `began`, on the monotonic clock, until now, as phase `name` of `parent`."""
        self._phases.append(_Phase(name, parent, began, time.monotonic(), moved, True))

    def restored(self, graphs: int, nodes: int) -> None:
        """Note how many graphs of how many kernel nodes, all together, the phase `graphs` restored."""
        self._restored = (graphs, nodes)

    def first_token(self, began: float) -> None:
        """The first token is on the host, of a request that `began` then: start-up ends here. Later calls change nothing."""
        if self._wall is None:
            self._note("first token", "", began, 0)
            self._wall = time.monotonic() - self._began

    def record(self) -> StartupRecord:
        """The phases so far, by start; those that end after the first token, with all their time."""
        from ouro_build.artifacts.records import PhaseRecord, StartupRecord

        wall = time.monotonic() - self._began if self._wall is None else self._wall
        phases = [
            PhaseRecord(
                name=p.name,
                parent=p.parent,
                start_s=round(p.began - self._began, 6),
                seconds=round(p.ended - p.began, 6),
                bytes=p.bytes,
                beside=p.beside,
            )
            for p in sorted(self._phases, key=lambda p: (p.began, -p.ended))
        ]
        graphs, nodes = self._restored
        return StartupRecord(wall_s=round(wall, 6), phases=tuple(phases), graphs=graphs, nodes=nodes)

    def _note(self, name: str, parent: str, began: float, moved: int) -> None:
        now = time.monotonic()
        self._phases.append(_Phase(name, parent, began, now, moved, False))
        if not parent:
            self._last = now
