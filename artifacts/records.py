"""What a worker reports about itself: start-up, coverage, and what was observed of an artifact on a device."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeVar

import msgspec

from ouro_build.artifacts.errors import ArtifactError


class Reason(Enum):
    """Why a step took another path than its graph. A closed list: reports and dashboards are keyed by it."""

    BUCKET_MISS = "bucket_miss"  # more rows than the largest bucket: split over several replays
    MODE_NOT_BUILT = "mode_not_built"  # no plan for the mode
    GRAPHS_DISABLED = "graphs_disabled"  # another executor was asked for
    GRAPH_BUDGET = "graph_budget"  # the graph was not restored, to save memory or time
    GRAPH_RESTORE_FAILED = "graph_restore_failed"
    NO_DEVICE = "no_device"  # no driver or no GPU
    NO_IMAGE_FOR_ARCH = "no_image_for_arch"  # nothing was compiled for this GPU
    DRIVER_TOO_OLD = "driver_too_old"  # the images need a newer driver


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
    """Programs of `rows` live rows that took `path` (an executor, `split` or `refused`) instead of one graph, `count` times."""

    reason: Reason
    program: str
    mode: str
    rows: int
    path: str
    count: int


class MassHistogram(_Record, frozen=True, kw_only=True):
    """Retained mass, the share of the attention's weight on the keys that were kept, of every capture.

    There is a value for each captured row, layer and query head; `counts` are of equal parts of 0 … 1, the first from 0. What
    it cost: `bytes` copied to the host, and `seconds` of the host's time.
    """

    values: int
    mean: float
    least: float
    counts: tuple[int, ...]
    bytes: int
    seconds: float


class CoverageRecord(_Record, frozen=True, kw_only=True):
    """Replays by graph key, fallbacks by reason and shape; `retained_mass` where it was asked for."""

    schema: Literal["ouro-coverage/1"] = "ouro-coverage/1"
    keys: tuple[KeyCount, ...]
    fallbacks: tuple[FallbackCount, ...]
    retained_mass: MassHistogram | None = None

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

    schema: Literal["ouro-startup/1"] = "ouro-startup/1"
    wall_s: float
    phases: tuple[PhaseRecord, ...]


class DeviceRecord(_Record, frozen=True, kw_only=True):
    """The GPU something was observed on. `memory` in bytes; `cuda` is the driver's CUDA version."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory: int
    cuda: tuple[int, int]


class ObservedKey(_Record, frozen=True, kw_only=True):
    """One graph key on one device. None stands for what was not run.

    `patterns` arrangements of live rows were run; `bit_equal` says whether `graph` and `launch` agreed in every bit.
    `error` is the largest difference from `reference` as a share of the tolerance (at most 1 is right). Times are medians
    of one run, in microseconds.
    """

    program: str
    bucket: int
    mode: str
    variant: str
    patterns: int
    bit_equal: bool | None
    error: float | None
    graph_us: float | None
    launch_us: float | None


class ObservedRecord(_Record, frozen=True, kw_only=True):
    """What a warm-up saw: the identity of the artifact it is about, the target, the device, and every key."""

    schema: Literal["ouro-observed/1"] = "ouro-observed/1"
    identity: str
    target: str
    device: DeviceRecord
    keys: tuple[ObservedKey, ...]


class BenchCheck(_Record, frozen=True, kw_only=True):
    """A program of one bucket, checked before anything was timed.

    `executors` ran it in `patterns` arrangements of live rows (one alone: twice), and `bit_equal` says whether all left the
    same bits. `error` is the largest difference from `reference` as a share of the tolerance, at most 1e9; None where that was
    not compared. `context` is that of a whole `step`, 0 for a program in made-up states. `right`: nothing is amiss.
    `uniform` is the program `mixed` held against those of single modes, row for row.
    """

    program: str
    bucket: int
    mode: str = "dense"
    variant: str = ""
    context: int
    patterns: int
    executors: tuple[str, ...]
    bit_equal: bool
    error: float | None
    right: bool


class BenchLine(_Record, frozen=True, kw_only=True):
    """A decode step of `rows` rows with `context` tokens each, padded to `bucket`: milliseconds, the median of several.

    `bytes` must be read: the layers' weights once a loop, the LM head, keys and values. `read_share` is their rate as a share
    of the rate at which this card reads its memory, None where that was not measured. `launches_layer` is the launches of a
    loop over its layers.
    """

    rows: int
    bucket: int
    context: int
    ms: float
    bytes: int
    tb_s: float
    read_share: float | None
    launches: int
    launches_layer: float
    tokens_s: float


class BaselineLine(_Record, frozen=True, kw_only=True):
    """The same step in torch: milliseconds, eager and by CUDA graph."""

    rows: int
    context: int
    eager_ms: float
    graph_ms: float


class BenchRecord(_Record, frozen=True, kw_only=True):
    """What `ouro-worker bench decode` saw. There are no `lines` if a check is not right.

    `device` is None for the host. `unchecked` says why nothing was compared with the reference, empty if it was. `read_tb_s`
    is the rate of reading `read_bytes`, all weights, once: None where it was not measured.
    """

    schema: Literal["ouro-bench/1"] = "ouro-bench/1"
    identity: str
    target: str
    executor: str
    device: DeviceRecord | None
    unchecked: str
    checks: tuple[BenchCheck, ...]
    read_bytes: int
    read_tb_s: float | None
    lines: tuple[BenchLine, ...]
    baseline: tuple[BaselineLine, ...]
    notes: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether no check failed."""
        return all(check.right for check in self.checks)


class SparseLine(_Record, frozen=True, kw_only=True):
    """Decoding of `rows` rows with `context` tokens each, dense and sparse from one artifact; medians in milliseconds.

    `attention_…` is the attention of all loops of a step, alone; the others are whole steps. Sparse rows keep `retained` keys.
    `…_share` is the rate at which the dense arm reads what it must, as a share of the rate at which this card reads its memory,
    None where that was not measured. `mass_ms` is a sparse step whose retained masses are copied to the host, None where that
    was not asked for, and `mass` the mean of those masses.
    """

    rows: int
    bucket: int
    context: int
    retained: int
    attention_dense_ms: float
    attention_sparse_ms: float
    attention_ratio: float
    attention_dense_share: float | None
    dense_ms: float
    sparse_ms: float
    ratio: float
    dense_share: float | None
    mass_ms: float | None = None
    mass: float | None = None


class SparseBenchRecord(_Record, frozen=True, kw_only=True):
    """What `ouro-worker bench sparse` saw; see `BenchRecord` for what both have."""

    schema: Literal["ouro-bench-sparse/1"] = "ouro-bench-sparse/1"
    identity: str
    target: str
    executor: str
    device: DeviceRecord | None
    unchecked: str
    checks: tuple[BenchCheck, ...]
    key_retention: float
    read_bytes: int
    read_tb_s: float | None
    lines: tuple[SparseLine, ...]
    notes: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether no check failed."""
        return all(check.right for check in self.checks)


Record = CoverageRecord | StartupRecord | ObservedRecord | BenchRecord | SparseBenchRecord
AnyRecord = TypeVar("AnyRecord", CoverageRecord, StartupRecord, ObservedRecord, BenchRecord, SparseBenchRecord)


def encode_record(record: Record) -> bytes:
    """The record as one line of JSON."""
    return msgspec.json.encode(record) + b"\n"


def decode_record(raw: bytes, kind: type[AnyRecord], where: str) -> AnyRecord:
    """Read a record strictly. Raises ArtifactError naming the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"not a record of this kind: {error}", where=where) from error
