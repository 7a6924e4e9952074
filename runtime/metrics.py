"""A worker's counters for Prometheus, put together when somebody asks and never before.

Requests and tokens have vLLM's names, so that its dashboards work, and the same with our prefix; the rest is ours alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.records import CoverageRecord, StartupRecord
from ouro_build.runtime.traffic import Histogram, Traffic
from ouro_build.runtime.worker import Worker

PREFIXES = ("ouro:", "vllm:")
_KEY = ("program", "bucket", "mode", "variant")


class WorkerCollector(Collector):
    """Turns what `worker` counts into metrics, on every scrape."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Every metric, of now."""
        worker, source = self._worker, self._worker.artifact.manifest.source
        model = source.name or worker.artifact.path.name
        yield from _traffic(worker.traffic, (model, "0"))
        yield from _coverage(worker.coverage(masses=False))
        yield from _startup(worker.startup())
        info = {
            "identity": worker.artifact.identity,
            "format": worker.artifact.manifest.format,
            "model_name": model,
            "target": worker.path.target.part.name,
            "executor": worker.executor,
            "reason": worker.path.reason.value if worker.path.reason else "",
        }
        yield InfoMetricFamily("ouro:artifact", "The artifact that runs, and the path it takes.", value=info)


def serve(worker: Worker, port: int) -> tuple[int, Callable[[], None]]:
    """Answer scrapes of `worker` on `port` of every interface (0: any that is free). Gives the port, and what ends it.

    Raises UsageError if the port can't be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(worker))
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise UsageError(f"port {port} can't be listened on: {error.strerror}", where="--metrics-port") from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close


def _traffic(traffic: Traffic, who: tuple[str, str]) -> Iterator[Metric]:
    labels = ("model_name", "engine")
    usage = traffic.kv_used / traffic.kv_blocks if traffic.kv_blocks else 0.0
    for prefix in PREFIXES:
        for name, text, value in (
            ("num_requests_running", "Requests that run.", traffic.running),
            ("num_requests_waiting", "Requests that wait.", traffic.waiting),
            ("kv_cache_usage_perc", "KV blocks in use; 1 is all.", usage),
        ):
            gauge = GaugeMetricFamily(prefix + name, text, labels=labels)
            gauge.add_metric(who, value)
            yield gauge
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens computed.", traffic.prompt_tokens),
            ("generation_tokens", "Tokens generated.", traffic.generated_tokens),
        ):
            yield _counter(prefix + name, text, labels, [(who, count)])
        ended = [((*who, reason), count) for reason, count in sorted(traffic.finished.copy().items())]
        yield _counter(prefix + "request_success", "Requests that finished.", (*labels, "finished_reason"), ended)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", traffic.first_token),
            ("inter_token_latency_seconds", "From a token of a request to its next.", traffic.between_tokens),
            ("e2e_request_latency_seconds", "From a request's arrival to its last token.", traffic.request),
        ):
            yield _histogram(prefix + name, text, labels, who, histogram)


def _coverage(record: CoverageRecord) -> Iterator[Metric]:
    keys = [((k.program, str(k.bucket), k.mode, k.variant), k) for k in record.keys]
    yield _counter("ouro:graph_replays", "Replays by graph key.", _KEY, [(at, k.replays) for at, k in keys])
    yield _counter("ouro:graph_live_rows", "Live rows in replays.", _KEY, [(at, k.live_rows) for at, k in keys])
    yield _counter("ouro:graph_padded_rows", "Padded rows in replays.", _KEY, [(at, k.padded_rows) for at, k in keys])
    times, rows = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for f in record.fallbacks:
        at = (f.reason.value, f.program, f.mode, f.path)
        times[at] += f.count
        rows[at] += f.count * f.rows
    labels = ("reason", "program", "mode", "path")
    yield _counter("ouro:fallbacks", "Programs that took another path than one graph.", labels, times.items())
    yield _counter("ouro:fallback_rows", "Live rows of those programs.", labels, rows.items())
    steps = Counter[tuple[str, ...]]()
    for step in record.steps:
        steps[step.mode,] += step.count
    yield _counter("ouro:decode_steps", "Decode steps, split or not.", ("mode",), steps.items())
    yield GaugeMetricFamily("ouro:coverage_share", "Live rows of decode loops in unsplit replays, over all.", record.share)
    yield GaugeMetricFamily("ouro:padded_share", "Padded rows over all rows of decode replays.", record.padded_share)


def _startup(record: StartupRecord) -> Iterator[Metric]:
    seconds, moved = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    for phase in record.phases:  # one that came twice is one series
        seconds[phase.name, phase.parent] += phase.seconds
        moved[phase.name, phase.parent] += phase.bytes
    for name, text, values in (
        ("ouro:startup_seconds", "Start-up by phase.", seconds),
        ("ouro:startup_bytes", "What each phase moved.", moved),
    ):
        gauge = GaugeMetricFamily(name, text, labels=("phase", "parent"))
        for at, value in values.items():
            gauge.add_metric(at, value)
        yield gauge
    yield GaugeMetricFamily("ouro:startup_wall_seconds", "From the start of the process to the first token.", record.wall_s)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], int]]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=labels)
    for at, value in values:
        counter.add_metric(at, value)
    return counter


def _histogram(name: str, text: str, labels: tuple[str, ...], who: tuple[str, ...], seen: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    upper = [*map(str, seen.bounds), "+Inf"]
    family.add_metric(who, list(zip(upper, accumulate(seen.counts.copy()), strict=True)), seen.sum)
    return family
