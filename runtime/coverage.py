"""What ran by its graph, what did not, and why."""

from __future__ import annotations

from collections import defaultdict

from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import CoverageRecord, FallbackCount, KeyCount, MassHistogram, Reason


class CoverageCounter:
    """Counts replays by graph key and fallbacks by reason and shape."""

    def __init__(self) -> None:
        self._replays: dict[ProgramKey, list[int]] = defaultdict(lambda: [0, 0])
        self._fallbacks: dict[tuple[Reason, str, str, int, str], int] = defaultdict(int)

    def replay(self, key: ProgramKey, rows: int) -> None:
        """A graph was replayed for `rows` live rows."""
        counts = self._replays[key]
        counts[0] += 1
        counts[1] += rows

    def fallback(self, reason: Reason, program: str, mode: str, rows: int, path: str, count: int = 1) -> None:
        """`rows` rows took `path` instead of one graph, `count` times."""
        self._fallbacks[reason, program, mode, rows, path] += count

    def clear(self) -> None:
        """Forget what was counted."""
        self._replays.clear()
        self._fallbacks.clear()

    def record(self, retained_mass: MassHistogram | None = None) -> CoverageRecord:
        """The counts so far, with what captures retained where that was kept."""
        keys = [
            KeyCount(
                program=key.program,
                bucket=key.bucket,
                mode=key.mode,
                variant=key.variant,
                replays=replays,
                live_rows=live,
                padded_rows=replays * key.bucket - live,
            )
            for key, (replays, live) in sorted(self._replays.items())
        ]
        ordered = sorted(self._fallbacks.items(), key=lambda item: (item[0][0].value, *item[0][1:]))
        fallbacks = [
            FallbackCount(reason=reason, program=program, mode=mode, rows=rows, path=path, count=count)
            for (reason, program, mode, rows, path), count in ordered
        ]
        return CoverageRecord(keys=tuple(keys), fallbacks=tuple(fallbacks), retained_mass=retained_mass)
