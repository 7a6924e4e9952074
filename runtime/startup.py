"""Start-up as data: named, nested phases with seconds and bytes, from the start of the process to the first token."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ouro_build.artifacts.records import PhaseRecord, StartupRecord


def process_start() -> float:
    """When this process started, on `time.monotonic`'s clock, to a clock tick (10 ms); now, where /proc does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    return time.monotonic() - max(age, 0.0)


@dataclass
class OpenPhase:
    """A phase in progress; set `bytes` to what it moved."""

    name: str
    bytes: int = 0


class StartupClock:
    """Collects phases. `began` is the start of the process on the monotonic clock.

    One thread opens phases inside one another by `phase`; others time theirs `beside` them.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = process_start() if began is None else began
        self._open: list[str] = []
        self._phases: list[PhaseRecord] = []
        self._wall: float | None = None
        self._note("interpreter and imports", "", self._began, 0)

    @property
    def current(self) -> str:
        """Name of the phase that is open; empty if none is."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[OpenPhase]:
        """Time a block as phase `name`, inside the phase that is open."""
        with self.beside(name, self.current) as phase:
            self._open.append(name)
            try:
                yield phase
            finally:
                self._open.pop()

    @contextmanager
    def beside(self, name: str, parent: str) -> Iterator[OpenPhase]:
        """Time a block on another thread as phase `name` of `parent`, whose other phases may overlap it."""
        began, phase = time.monotonic(), OpenPhase(name)
        try:
            yield phase
        finally:
            self._note(name, parent, began, phase.bytes)

    def first_token(self, began: float) -> None:
        """The first token is on the host, of a request that `began` then: start-up ends here. Later calls change nothing."""
        if self._wall is None:
            self._note("first token", "", began, 0)
            self._wall = time.monotonic() - self._began

    def record(self) -> StartupRecord:
        """The phases so far, by start."""
        wall = time.monotonic() - self._began if self._wall is None else self._wall
        phases = tuple(sorted(self._phases, key=lambda p: (p.start_s, -p.seconds)))
        return StartupRecord(wall_s=round(wall, 6), phases=phases)

    def _note(self, name: str, parent: str, began: float, moved: int) -> None:
        start, seconds = began - self._began, time.monotonic() - began
        self._phases.append(
            PhaseRecord(name=name, parent=parent, start_s=round(start, 6), seconds=round(seconds, 6), bytes=moved)
        )
