"""What a worker reports about itself: start-up, coverage, and what was observed of an artifact on a device."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal, TypeVar

import msgspec

from ouro_build.artifacts.errors import UsageError


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


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""How often, or how many: a number that every reader of JSON reads exactly."""
Rows = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""Rows of a batch, or of a bucket."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything in a record."""


class KeyCount(_Record, frozen=True, kw_only=True):
    """Replays of one graph, and the rows in them that were live and that were padding."""

    program: str
    bucket: Rows
    mode: str
    variant: str
    replays: Count
    live_rows: Count
    padded_rows: Count


class FallbackCount(_Record, frozen=True, kw_only=True):
    """Programs of `rows` live rows that took `path` (an executor, `split` or `refused`) instead of one graph, `count` times."""

    reason: Reason
    program: str
    mode: str
    rows: Count
    path: str
    count: Count


class StepCount(_Record, frozen=True, kw_only=True):
    """`count` decode steps of `rows` live rows, each of `loops` loops in `mode`, whatever path they took.

    The mode of steps whose loops ran in several is `sparse`.
    Steps that a scheduler makes of single programs are not among them: nobody but it knows where they begin.
    """

    mode: str
    rows: Rows
    loops: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    count: Count


class GraphSize(_Record, frozen=True, kw_only=True):
    """A graph that the artifact declares, replayed or not, and its kernel nodes."""

    program: str
    bucket: Rows
    mode: str
    variant: str
    nodes: Count


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
    """Replays by graph key, fallbacks by reason and shape, decode steps by shape, and the graphs that there could have been.

    `retained_mass` is there where it was asked for. Version 1 had neither `steps` nor `graphs`.
    """

    schema: Literal["ouro-coverage/2"] = "ouro-coverage/2"
    keys: tuple[KeyCount, ...]
    fallbacks: tuple[FallbackCount, ...]
    steps: tuple[StepCount, ...]
    graphs: tuple[GraphSize, ...]
    retained_mass: MassHistogram | None = None

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts that decode loops have graphs for, ascending."""
        return tuple(sorted({g.bucket for g in self.graphs if g.program == "recurrent"}))

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

    @property
    def replays_a_step(self) -> float:
        """Replays of decode loops over decode steps; 0 if there were none. A step of four loops, not split, has four."""
        steps = sum(s.count for s in self.steps)
        return sum(k.replays for k in self.keys if k.program == "recurrent") / steps if steps else 0.0


class PhaseRecord(_Record, frozen=True, kw_only=True):
    """A named part of start-up. `start_s` counts from the start of the process; `parent` is empty for a phase of its own.

    `bytes` is what it moved or checked, 0 if that says nothing. A phase `beside` ran on another thread: it may overlap its
    parent's other phases, which follow one another, and outlast its parent.
    """

    name: str
    parent: str
    start_s: float
    seconds: float
    bytes: int
    beside: bool = False

    @property
    def rate(self) -> float | None:
        """Bytes a second; None for a phase without bytes."""
        return self.bytes / self.seconds if self.bytes and self.seconds else None


class StartupRecord(_Record, frozen=True, kw_only=True):
    """Start-up from the start of the process to the first token, `wall_s` seconds.

    The phase `graphs` restored `graphs` graphs of `nodes` kernel nodes, all together.
    """

    schema: Literal["ouro-startup/1"] = "ouro-startup/1"
    wall_s: float
    phases: tuple[PhaseRecord, ...]
    graphs: int = 0
    nodes: int = 0

    @property
    def accounted(self) -> float:
        """Share of `wall_s` that lies in a phase which has no parts of its own; phases beside others do not count."""
        own = [p for p in self.phases if not p.beside]
        parents = {p.parent for p in own}
        named = sum(p.seconds for p in own if p.name not in parents)
        return named / self.wall_s if self.wall_s else 0.0

    @property
    def node_us(self) -> float | None:
        """Microseconds that restoring took a kernel node; None if no graph was restored."""
        seconds = sum(p.seconds for p in self.phases if p.name == "graphs")
        return seconds / self.nodes * 1e6 if self.nodes else None


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
    not compared. `context` is that of a whole `step` or the tokens of a whole `prompt`, 0 for a program in made-up states.
    `right`: nothing is amiss.
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


class PromptLine(_Record, frozen=True, kw_only=True):
    """The prefill of one prompt of `tokens` tokens in `chunks` of up to `bucket` rows: milliseconds, the median of several.

    `flop`: operations of the model's matrices and attention, an addition and a multiplication counted as two.
    """

    tokens: int
    bucket: int
    chunks: int
    ms: float
    tokens_s: float
    flop: int
    tflop_s: float


class PromptBaseline(_Record, frozen=True, kw_only=True):
    """The prefill of the same prompt in torch, eager, in one piece: milliseconds."""

    tokens: int
    eager_ms: float


class BenchRecord(_Record, frozen=True, kw_only=True):
    """What `ouro-worker bench decode` saw. There are no `lines` and no `prompts` if a check is not right.

    `device` is None for the host. `unchecked` says why nothing was compared with the reference, empty if it was. `read_tb_s`
    is the rate of reading `read_bytes`, all weights, once: None where it was not measured. `torch_read_tb_s` is that of
    torch.sum over as many bytes, measured where the baseline was asked for.
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
    prompts: tuple[PromptLine, ...] = ()
    prompt_baseline: tuple[PromptBaseline, ...] = ()
    torch_read_tb_s: float | None = None
    notes: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether no check failed."""
        return all(check.right for check in self.checks)

    @property
    def read_over_torch(self) -> float | None:
        """The rate of reading as a share of torch.sum's; None unless both were measured."""
        return None if self.read_tb_s is None or self.torch_read_tb_s is None else self.read_tb_s / self.torch_read_tb_s


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


AnyRecord = TypeVar("AnyRecord", bound=msgspec.Struct)


def encode_record(record: msgspec.Struct) -> bytes:
    """The record as one line of JSON."""
    return msgspec.json.encode(record) + b"\n"


def decode_record(raw: bytes, kind: type[AnyRecord], where: str) -> AnyRecord:
    """Read a record strictly. Raises UsageError naming the field, and the schema that this version reads."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        schema = next(field.default for field in msgspec.structs.fields(kind) if field.name == "schema")
        hint = f"Expected: a whole record of schema {schema}. Other versions of ouro-build may write another."
        raise UsageError(f"not a record of this kind: {error}", where=where, hint=hint) from error
