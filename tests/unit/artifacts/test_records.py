from typing import Any

import pytest

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.records import (
    BaselineLine,
    BenchCheck,
    BenchLine,
    BenchRecord,
    CoverageRecord,
    DeviceRecord,
    FallbackCount,
    KeyCount,
    MassHistogram,
    ObservedKey,
    ObservedRecord,
    PhaseRecord,
    Reason,
    SparseBenchRecord,
    SparseLine,
    StartupRecord,
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
RECORDS = (COVERAGE, STARTUP, OBSERVED, BENCH, SPARSE)


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.schema)
def test_round_trip(record: CoverageRecord) -> None:
    assert decode_record(encode_record(record), type(record), "f") == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.schema)
def test_strict(record: CoverageRecord) -> None:
    raw = encode_record(record)
    for damaged in (
        raw.replace(b"/1", b"/2", 1),
        raw.replace(b'{"schema"', b'{"more":1,"schema"', 1),
        raw[:-3],
        b"[]",
    ):
        with pytest.raises(ArtifactError, match="f: not a record of this kind"):
            decode_record(damaged, type(record), "f")


def test_reasons_are_closed() -> None:
    with pytest.raises(ArtifactError, match=r"Invalid enum value 'bad_luck'.*reason"):
        decode_record(encode_record(COVERAGE).replace(b"bucket_miss", b"bad_luck"), CoverageRecord, "f")


def test_shares() -> None:
    # 8 live rows were in replays, 6 of them in split ones; 2 more ran by the reference.
    assert COVERAGE.share == pytest.approx(2 / 10)
    assert COVERAGE.padded_share == pytest.approx(4 / 12)
    nothing = CoverageRecord(keys=(), fallbacks=())
    assert (nothing.share, nothing.padded_share) == (0, 0)
