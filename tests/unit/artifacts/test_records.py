import re
from typing import Any

import msgspec
import pytest

from ouro_build.artifacts.bench_records import (
    FirstRequest,
    HostTime,
    Latency,
    PhaseSummary,
    ServeBenchRecord,
    ServeLine,
    StartupBenchRecord,
)
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.records import (
    BaselineLine,
    BenchCheck,
    BenchLine,
    BenchRecord,
    CoverageRecord,
    DeviceRecord,
    FallbackCount,
    GraphSize,
    KeyCount,
    MassHistogram,
    ObservedKey,
    ObservedRecord,
    PhaseRecord,
    Reason,
    SparseBenchRecord,
    SparseLine,
    StartupRecord,
    StepCount,
    decode_record,
    encode_record,
)

KEY: dict[str, Any] = {"bucket": 4, "mode": "dense", "variant": ""}
COVERAGE = CoverageRecord(
    keys=(
        KeyCount(program="recurrent", replays=3, live_rows=8, padded_rows=4, **KEY),
        KeyCount(program="coda", replays=1, live_rows=2, padded_rows=2, **KEY),
    ),
    fallbacks=(
        FallbackCount(reason=Reason.BUCKET_MISS, program="recurrent", mode="dense", rows=6, path="split", count=1),
        FallbackCount(reason=Reason.NO_DEVICE, program="recurrent", mode="dense", rows=2, path="reference", count=1),
    ),
    steps=(StepCount(mode="dense", rows=2, loops=1, count=2), StepCount(mode="dense", rows=6, loops=1, count=1)),
    graphs=(
        GraphSize(program="coda", nodes=3, **KEY),
        GraphSize(program="recurrent", nodes=20, **KEY),
    ),
    retained_mass=MassHistogram(values=6, mean=0.5, least=0.25, counts=(1, 2, 3), bytes=24, seconds=0.001),
)
STARTUP = StartupRecord(wall_s=0.5, phases=(PhaseRecord(name="open", parent="", start_s=0.1, seconds=0.2, bytes=12),))
OBSERVED = ObservedRecord(
    identity="0" * 64,
    target="h200",
    device=DeviceRecord(name="NVIDIA H200", capability=(9, 0), sm_count=132, memory=1 << 37, cuda=(13, 0)),
    keys=(
        ObservedKey(
            program="recurrent", bucket=1, mode="dense", variant="", patterns=2, bit_equal=True, error=0.25,
            graph_us=812.5, launch_us=None,
        ),
    ),
)  # fmt: skip
BENCH = BenchRecord(
    identity="0" * 64,
    target="h200",
    executor="graph",
    device=OBSERVED.device,
    unchecked="",
    checks=(
        BenchCheck(
            program="coda", bucket=1, context=0, patterns=1, executors=("graph", "launch"), bit_equal=True, error=0.25,
            right=True,
        ),
    ),
    read_bytes=1 << 31,
    read_tb_s=4.25,
    lines=(
        BenchLine(
            rows=1, bucket=1, context=1024, ms=2.5, bytes=10**10, tb_s=4.0, read_share=0.875, launches=700, launches_layer=7.5,
            tokens_s=400.0,
        ),
    ),
    baseline=(BaselineLine(rows=1, context=1024, eager_ms=50.0, graph_ms=9.5),),
    torch_read_tb_s=4.0,
    notes=(),
)  # fmt: skip
SPARSE = SparseBenchRecord(
    identity="0" * 64,
    target="h200",
    executor="graph",
    device=None,
    unchecked="",
    checks=BENCH.checks,
    key_retention=0.1,
    read_bytes=1 << 31,
    read_tb_s=4.25,
    lines=(
        SparseLine(
            rows=16, bucket=16, context=8192, retained=820, attention_dense_ms=30.0, attention_sparse_ms=18.0,
            attention_ratio=0.6, attention_dense_share=0.85, dense_ms=40.0, sparse_ms=28.0, ratio=0.7, dense_share=0.84,
        ),
    ),
    notes=(),
)  # fmt: skip
LATENCY = Latency(mean=2.0, p50=1.5, p95=3.0, p99=4.0, max=4.5)
BENCH_STARTUP = StartupBenchRecord(
    identity="0" * 64,
    executor="graph",
    device=OBSERVED.device,
    verify="full",
    prompt_tokens=16,
    avg_cold_startup_time=0.5,
    cold_startup_times=(0.5,),
    cold_startup_percentiles={"50": 0.5},
    avg_warm_startup_time=0.25,
    warm_startup_times=(0.25,),
    warm_startup_percentiles={"50": 0.25},
    cold_by="fadvise",
    cold_resident=0.0,
    accounted=0.995,
    graphs=41,
    nodes=2187,
    graphs_ms=20.5,
    node_us=9.5,
    phases=(PhaseSummary(name="open", parent="", beside=False, start_s=0.1, seconds=0.2, bytes=12, rate=60.0),),
    first_requests=(FirstRequest(program="decode", rows=1, first_ms=5.0, hundredth_ms=4.0, median_ms=4.0),),
    cold=(STARTUP,),
    warm=(STARTUP,),
    baseline=(),
    notes=(),
)
BENCH_SERVE = ServeBenchRecord(
    identity="0" * 64,
    executor="graph",
    sparse=True,
    device=OBSERVED.device,
    seed=0,
    lines=(
        ServeLine(
            concurrency=8, requests=16, input=1024, output=128, seconds=2.0, output_tokens_s=1024.0, total_tokens_s=9216.0,
            requests_s=8.0, ttft_ms=LATENCY, itl_ms=LATENCY, steps=286,
            host=HostTime(submit_us=500.0, wait_us=9.5, other_us=1.5), share=1.0, padded_share=0.0, coverage=COVERAGE,
        ),
    ),
    notes=(),
)  # fmt: skip
RECORDS = (COVERAGE, STARTUP, OBSERVED, BENCH, SPARSE, BENCH_STARTUP, BENCH_SERVE)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.schema)
def test_round_trip(record: CoverageRecord) -> None:
    assert decode_record(encode_record(record), type(record), "f") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.schema)
def test_strict(record: CoverageRecord) -> None:
    raw = encode_record(record)
    for damaged in (
        raw.replace(b"/", b"/9", 1),
        raw.replace(b'{"schema"', b'{"more":1,"schema"', 1),
        raw[:-3],
        raw.replace(b"[", b"\xff", 1),
        b"[]",
        b"",
    ):
        with pytest.raises(UsageError, match=f"f: not a record of this kind.*\n.*{record.schema}"):
            decode_record(damaged, type(record), "f")


def test_reasons_are_closed() -> None:
    with pytest.raises(UsageError, match=r"Invalid enum value 'bad_luck'.*reason"):
        decode_record(encode_record(COVERAGE).replace(b"bucket_miss", b"bad_luck"), CoverageRecord, "f")


def test_a_first_request_beside_the_hundredth() -> None:
    assert BENCH_STARTUP.first_requests[0].excess == pytest.approx(0.25)


def test_reading_beside_torch() -> None:
    assert BENCH.read_over_torch == pytest.approx(4.25 / 4)
    assert msgspec.structs.replace(BENCH, torch_read_tb_s=None).read_over_torch is None
    assert msgspec.structs.replace(BENCH, read_tb_s=None).read_over_torch is None


def test_start_up_by_its_parts() -> None:
    def phase(name: str, parent: str, seconds: float, beside: bool = False) -> PhaseRecord:
        return PhaseRecord(name=name, parent=parent, start_s=0.0, seconds=seconds, bytes=0, beside=beside)

    phases = (phase("load", "", 0.75), phase("a", "load", 0.25), phase("graphs", "load", 0.375), phase("b", "load", 0.5, True))
    record = StartupRecord(wall_s=1.0, phases=(*phases, phase("first token", "", 0.125)), graphs=2, nodes=1000)
    assert record.accounted == 0.25 + 0.375 + 0.125
    assert record.node_us == pytest.approx(375)
    assert STARTUP.node_us is None
    assert STARTUP.phases[0].rate == pytest.approx(60)


def test_shares() -> None:
    # 8 live rows were in replays, 6 of them in split ones; 2 more ran by the reference.
    assert COVERAGE.share == pytest.approx(2 / 10)
    assert COVERAGE.padded_share == pytest.approx(4 / 12)
    assert COVERAGE.replays_a_step == 1
    assert COVERAGE.buckets == (4,)
    nothing = CoverageRecord(keys=(), fallbacks=(), steps=(), graphs=())
    assert (nothing.share, nothing.padded_share, nothing.replays_a_step) == (0, 0, 0)


@pytest.mark.parametrize(("field", "value"), [("replays", -1), ("live_rows", 1 << 53), ("bucket", 0), ("rows", 1 << 30)])
def test_numbers_that_no_worker_counts_are_refused(field: str, value: int) -> None:
    raw = re.sub(rf'"{field}":\d+', f'"{field}":{value}', encode_record(COVERAGE).decode())
    with pytest.raises(UsageError, match=f"Expected `int`.*{field}"):
        decode_record(raw.encode(), CoverageRecord, "f")
