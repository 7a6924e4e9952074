"""Metrics: what was counted under the names that dashboards know, put together on a scrape and at no other time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.records import CoverageRecord, PhaseRecord, StartupRecord
from ouro_build.runtime.cli import cli
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.metrics import WorkerCollector
from ouro_build.runtime.traffic import Histogram, Traffic
from ouro_build.runtime.worker import Worker
from tests.reference_worker import GOLDEN, ReferenceWorker, reference_worker
from tests.unit.artifacts.test_records import COVERAGE

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
WHO = {"model_name": "org/model", "engine": "0"}
STARTUP = StartupRecord(
    wall_s=0.75,
    phases=(
        PhaseRecord(name="load", parent="", start_s=0.1, seconds=0.5, bytes=0),
        PhaseRecord(name="weights", parent="load", start_s=0.1, seconds=0.25, bytes=100),
        PhaseRecord(name="weights", parent="load", start_s=0.4, seconds=0.125, bytes=10),
    ),
)


def a_worker(traffic: Traffic, coverage: CoverageRecord = COVERAGE, name: str = "org/model") -> Worker:
    manifest = SimpleNamespace(source=SimpleNamespace(name=name), format="1.0")
    target = SimpleNamespace(part=SimpleNamespace(name="h200"))
    made: Any = SimpleNamespace(
        artifact=SimpleNamespace(manifest=manifest, path=Path("/somewhere/mine.ouro"), identity="ab" * 32),
        path=SimpleNamespace(target=target, reason=None),
        executor="graph",
        traffic=traffic,
        coverage=lambda masses: coverage,
        startup=lambda: STARTUP,
    )
    return cast(Worker, made)


def scraped(worker: Worker) -> Samples:
    """Every sample as a scraper reads it; no series may come twice."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(worker))
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            at = (sample.name, tuple(sorted(sample.labels.items())))
            assert at not in found
            found[at] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def engine(traffic: Traffic) -> tuple[Engine, ReferenceWorker]:
    made = reference_worker(str(GOLDEN / "gqa-fp32"), buckets=(1, 2), prefill_buckets=(8,), max_context=64, max_requests=2)
    return Engine(made.steps, made.kv_blocks, 2, traffic=traffic), made


def test_requests_and_tokens_under_both_prefixes() -> None:
    traffic = Traffic()
    runs, made = engine(traffic)
    for length in (3, 5, 4):
        runs.submit(Request(list(range(1, 1 + length)), 4))
    runs.step()
    during = scraped(a_worker(traffic))
    blocks = 2 / made.kv_blocks
    while runs.step():
        pass
    after = scraped(a_worker(traffic))
    for prefix in ("ouro:", "vllm:"):
        assert value(during, prefix + "num_requests_running", **WHO) == 2
        assert value(during, prefix + "num_requests_waiting", **WHO) == 1
        assert value(during, prefix + "kv_cache_usage_perc", **WHO) == pytest.approx(blocks)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert value(after, prefix + gauge, **WHO) == 0
        assert value(after, prefix + "prompt_tokens_total", **WHO) == 12
        assert value(after, prefix + "generation_tokens_total", **WHO) == 12
        assert value(after, prefix + "request_success_total", finished_reason="length", **WHO) == 3
        for histogram, count in (
            ("time_to_first_token_seconds", 3),
            ("inter_token_latency_seconds", 9),
            ("e2e_request_latency_seconds", 3),
        ):
            assert value(after, f"{prefix}{histogram}_count", **WHO) == count
            assert value(after, f"{prefix}{histogram}_bucket", le="+Inf", **WHO) == count
            assert value(after, f"{prefix}{histogram}_sum", **WHO) > 0


def test_coverage_startup_and_the_artifact() -> None:
    found = scraped(a_worker(Traffic()))
    key = {"program": "recurrent", "bucket": "4", "mode": "dense", "variant": ""}
    assert value(found, "ouro:graph_replays_total", **key) == 3
    assert value(found, "ouro:graph_live_rows_total", **key) == 8
    assert value(found, "ouro:graph_padded_rows_total", **key) == 4
    miss = {"reason": "bucket_miss", "program": "recurrent", "mode": "dense", "path": "split"}
    assert value(found, "ouro:fallbacks_total", **miss) == 1
    assert value(found, "ouro:fallback_rows_total", **miss) == 6
    assert value(found, "ouro:decode_steps_total", mode="dense") == 3
    assert value(found, "ouro:coverage_share") == pytest.approx(COVERAGE.share)
    assert value(found, "ouro:padded_share") == pytest.approx(COVERAGE.padded_share)
    assert value(found, "ouro:startup_seconds", phase="weights", parent="load") == 0.375
    assert value(found, "ouro:startup_bytes", phase="weights", parent="load") == 110
    assert value(found, "ouro:startup_wall_seconds") == 0.75
    info = {"identity": "ab" * 32, "format": "1.0", "model_name": "org/model", "target": "h200", "executor": "graph"}
    assert value(found, "ouro:artifact_info", reason="", **info) == 1


def test_a_checkpoint_without_a_name_goes_by_its_folder_and_names_are_escaped() -> None:
    nameless = scraped(a_worker(Traffic(), name=""))
    assert value(nameless, "vllm:generation_tokens_total", model_name="mine.ouro", engine="0") == 0
    odd = 'a"} 1\nevil{x="'
    assert value(scraped(a_worker(Traffic(), name=odd)), "vllm:generation_tokens_total", model_name=odd, engine="0") == 0


def test_a_value_on_a_bound_is_within_it() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 1.0, 2.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == pytest.approx(3.65)


def test_requests_lost_with_the_device_do_not_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic()
    runs, made = engine(traffic)

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("gone")

    monkeypatch.setattr(made.steps, "submit_prefill", fail)
    runs.submit(Request([1, 2], 4))
    with pytest.raises(DeviceError, match="1 requests were lost"):
        runs.run()
    assert (traffic.running, traffic.waiting, traffic.kv_used, traffic.finished.total()) == (0, 0, 0, 0)


def test_without_the_extra_the_flag_says_which_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ouro_build.artifacts.console.find_spec", lambda name: None)
    arguments = ["run", "nowhere.ouro", "--prompt", "x", "--max-tokens", "1"]
    assert exit_code(cli, [*arguments, "--metrics-port", "0"]) == 1
    assert "pip install 'ouro-build[metrics]'" in capsys.readouterr().err
    assert exit_code(cli, arguments) == 2


def test_a_worker_that_serves_no_metrics_loads_nothing_for_them() -> None:
    code = "import sys, ouro_build.runtime.cli; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
