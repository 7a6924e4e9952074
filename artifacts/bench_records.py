"""What `ouro-worker bench startup` and `bench serve` saw."""

from __future__ import annotations

from typing import Literal

import msgspec

from ouro_build.artifacts.records import CoverageRecord, DeviceRecord, StartupRecord


class _Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything in these records."""


class FirstRequest(_Seen, frozen=True, kw_only=True):
    """A step of `rows` rows of `program` (`decode` or `prefill`) in a fresh worker: the first beside the hundredth.

    Wall time from the call to the tokens on the host. `median_ms` is that of all hundred.
    """

    program: str
    rows: int
    first_ms: float
    hundredth_ms: float
    median_ms: float

    @property
    def excess(self) -> float:
        """By what share the first took longer than the hundredth; negative if it was quicker."""
        return self.first_ms / self.hundredth_ms - 1


class PhaseSummary(_Seen, frozen=True, kw_only=True):
    """A phase of start-up over several runs: medians. `rate` is bytes a second, None for a phase without bytes."""

    name: str
    parent: str
    beside: bool
    start_s: float
    seconds: float
    bytes: int
    rate: float | None


class StartupBenchRecord(_Seen, frozen=True, kw_only=True):
    """What `ouro-worker bench startup` saw: seconds from the start of a process to its first token, by the parent's clock.

    Names as `vllm bench startup` has them; percentiles are keyed by their number. Nothing is compiled, so there are no compile
    times. Cold runs follow a drop of the page cache `cold_by`: of all files (`drop_caches`), or of the artifact's own
    (`fadvise`); `cold_resident` is the largest share of the artifact that was in memory nonetheless before one.

    `phases` are medians of the warm runs, `accounted` the least share of a warm run's time that its phases account for.
    `graphs` graphs of `nodes` kernel nodes were restored in `graphs_ms` milliseconds (median). `cold` and `warm` are the runs'
    own records. `baseline` are those of torch: same weights, a CUDA graph captured for every decode bucket.
    """

    schema: Literal["ouro-bench-startup/1"] = "ouro-bench-startup/1"
    identity: str
    executor: str
    device: DeviceRecord | None
    verify: str
    prompt_tokens: int
    avg_cold_startup_time: float
    cold_startup_times: tuple[float, ...]
    cold_startup_percentiles: dict[str, float]
    avg_warm_startup_time: float
    warm_startup_times: tuple[float, ...]
    warm_startup_percentiles: dict[str, float]
    cold_by: Literal["drop_caches", "fadvise"]
    cold_resident: float
    accounted: float
    graphs: int
    nodes: int
    graphs_ms: float
    node_us: float | None
    phases: tuple[PhaseSummary, ...]
    first_requests: tuple[FirstRequest, ...]
    cold: tuple[StartupRecord, ...]
    warm: tuple[StartupRecord, ...]
    baseline: tuple[StartupRecord, ...]
    notes: tuple[str, ...]


class Latency(_Seen, frozen=True, kw_only=True):
    """Milliseconds over all requests, or all gaps between a request's tokens."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class HostTime(_Seen, frozen=True, kw_only=True):
    """Microseconds of the host's thread an engine step, on average.

    `submit_us` schedule and submit, `wait_us` wait for the device, `other_us` take tokens and retire requests.
    """

    submit_us: float
    wait_us: float
    other_us: float


class ServeLine(_Seen, frozen=True, kw_only=True):
    """A closed loop of `concurrency` requests at once, each replaced when it ends, until `requests` have been served.

    `seconds` run from the first submission to the last token, prefill and drain included; `output_tokens_s` is over all of
    them. `ttft_ms` counts from a request's submission. `coverage` is of this load alone.
    """

    concurrency: int
    requests: int
    input: int
    output: int
    seconds: float
    output_tokens_s: float
    total_tokens_s: float
    requests_s: float
    ttft_ms: Latency
    itl_ms: Latency
    steps: int
    host: HostTime
    share: float
    padded_share: float
    coverage: CoverageRecord


class ServeBenchRecord(_Seen, frozen=True, kw_only=True):
    """What `ouro-worker bench serve` saw. `device` is None for the host; `sparse` is whether requests decoded sparsely."""

    schema: Literal["ouro-bench-serve/1"] = "ouro-bench-serve/1"
    identity: str
    executor: str
    sparse: bool
    device: DeviceRecord | None
    seed: int
    lines: tuple[ServeLine, ...]
    notes: tuple[str, ...]
