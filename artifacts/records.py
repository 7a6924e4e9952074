"""What a worker reports about itself: start-up, coverage, and what was observed of an artifact on a device."""

from __future__ import annotations

from enum import Enum

import msgspec


class Reason(Enum):
    """Why a step took another path than its graph. A closed list: reports and dashboards are keyed by it."""

    BUCKET_MISS = "bucket_miss"  # more rows than the largest bucket: split over several replays
    MODE_NOT_BUILT = "mode_not_built"  # no plan for the mode
    GRAPHS_DISABLED = "graphs_disabled"  # another executor was asked for
    GRAPH_BUDGET = "graph_budget"  # the graph was not restored, to save memory or time
    GRAPH_RESTORE_FAILED = "graph_restore_failed"
    NO_DEVICE = "no_device"  # no driver or no GPU
    NO_IMAGE_FOR_ARCH = "no_image_for_arch"  # nothing was compiled for this GPU


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything in a record."""


class KeyCount(_Record, frozen=True, kw_only=True):
    """Replays of one graph, and the rows in them that were live and that were padding."""

    program: str
    bucket: int
    mode: str
    variant: str
    replays: int
    live_rows: int
    padded_rows: int


class FallbackCount(_Record, frozen=True, kw_only=True):
    """Programs of `rows` live rows that ran `count` times by `path` instead of one graph."""

    reason: Reason
    program: str
    mode: str
    rows: int
    path: str
    count: int


class CoverageRecord(_Record, frozen=True, kw_only=True):
    """Replays by graph key, fallbacks by reason and shape."""

    schema: str = "ouro-coverage/1"
    keys: tuple[KeyCount, ...]
    fallbacks: tuple[FallbackCount, ...]

    @property
    def share(self) -> float:
        """Live rows of decode loops in unsplit replays, over live rows of all decode loops; 0 if there were none."""
        replayed = sum(k.live_rows for k in self.keys if k.program == "recurrent")
        misses = [f for f in self.fallbacks if f.program == "recurrent"]
        split = sum(f.rows * f.count for f in misses if f.reason is Reason.BUCKET_MISS)
        other = sum(f.rows * f.count for f in misses if f.reason is not Reason.BUCKET_MISS)
        return max(0, replayed - split) / (replayed + other) if replayed + other else 0.0

    @property
    def padded_share(self) -> float:
        """Padded rows over all rows of the replays of decode loops; 0 if there were none."""
        keys = [k for k in self.keys if k.program == "recurrent"]
        rows = sum(k.live_rows + k.padded_rows for k in keys)
        return sum(k.padded_rows for k in keys) / rows if rows else 0.0


class PhaseRecord(_Record, frozen=True, kw_only=True):
    """A named part of start-up. `start_s` counts from the start of the process; `parent` is empty for a phase of its own."""

    name: str
    parent: str
    start_s: float
    seconds: float
    bytes: int


class StartupRecord(_Record, frozen=True, kw_only=True):
    """Start-up from the start of the process to the first token, `wall_s` seconds."""

    schema: str = "ouro-startup/1"
    wall_s: float
    phases: tuple[PhaseRecord, ...]
