"""Records to report on: plain ones, and ones by somebody who means harm."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import (
    CoverageRecord,
    DeviceRecord,
    FallbackCount,
    GraphSize,
    KeyCount,
    ObservedKey,
    ObservedRecord,
    PhaseRecord,
    Reason,
    StartupRecord,
    StepCount,
    encode_record,
)

EVIL = '<script>alert("x")</script>\x1b[31m\u202e"><img src=x onerror=\'y\'>&amp;'
MOST = (1 << 53) - 1


def phase(name: str, parent: str, start: float, seconds: float, bytes_: int = 0) -> PhaseRecord:
    return PhaseRecord(name=name, parent=parent, start_s=start, seconds=seconds, bytes=bytes_)


STARTUP = StartupRecord(
    wall_s=0.8,
    phases=(
        phase("interpreter and imports", "", 0.0, 0.125),
        phase("load", "", 0.125, 0.625),
        phase("weights", "load", 0.25, 0.5, 2 << 30),
        phase("hashing", "weights", 0.25, 0.25, 1 << 30),
        msgspec.structs.replace(phase("graphs", "load", 0.7, 0.05), beside=True),
        phase("first token", "", 0.75, 0.05),
    ),
    graphs=5,
    nodes=40,
)
EARLIER_STARTUP = StartupRecord(wall_s=1.6, phases=(phase("load", "", 0.125, 1.25), phase("gone", "load", 0.5, 0.25)))


def key(program: str, bucket: int, replays: int, live: int, mode: str = "dense") -> KeyCount:
    padded = replays * bucket - live
    return KeyCount(program=program, bucket=bucket, mode=mode, variant="", replays=replays, live_rows=live, padded_rows=padded)


def graph(program: str, bucket: int, mode: str = "dense", nodes: int = 20) -> GraphSize:
    return GraphSize(program=program, bucket=bucket, mode=mode, variant="", nodes=nodes)


def fallback(reason: Reason, program: str, rows: int, path: str, count: int) -> FallbackCount:
    return FallbackCount(reason=reason, program=program, mode="dense", rows=rows, path=path, count=count)


COVERAGE = CoverageRecord(
    keys=(key("recurrent", 4, 40, 130), key("recurrent", 16, 8, 112), key("coda", 4, 10, 32), key("prefill", 16, 4, 40)),
    fallbacks=(
        fallback(Reason.BUCKET_MISS, "recurrent", 20, "split", 4),
        fallback(Reason.GRAPH_RESTORE_FAILED, "coda", 14, "launch", 2),
    ),
    steps=(
        StepCount(mode="dense", rows=3, loops=4, count=9),
        StepCount(mode="dense", rows=14, loops=4, count=1),
        StepCount(mode="dense", rows=20, loops=4, count=1),
    ),
    graphs=(*(graph(p, b) for p in ("recurrent", "coda") for b in (1, 4, 16)), graph("prefill", 16)),
)
EARLIER_COVERAGE = msgspec.structs.replace(COVERAGE, keys=(key("recurrent", 16, 48, 242),), fallbacks=())

EVIL_STARTUP = StartupRecord(
    wall_s=1e308,
    phases=(
        phase(EVIL, EVIL, -1e308, 1e308, -(1 << 62)),
        phase("a", "b", 1e308, 1e308, 1 << 200),
        phase("b", "a", 0.0, -5.0),
    ),
)
EVIL_COVERAGE = CoverageRecord(
    keys=(
        KeyCount(program=EVIL, bucket=1 << 20, mode=EVIL, variant=EVIL, replays=MOST, live_rows=MOST, padded_rows=MOST),
        key("recurrent", 1 << 20, 1, 1, EVIL),
    ),
    fallbacks=(FallbackCount(reason=Reason.NO_DEVICE, program=EVIL, mode=EVIL, rows=MOST, path=EVIL, count=MOST),),
    steps=(StepCount(mode=EVIL, rows=1 << 20, loops=1 << 10, count=MOST),),
    graphs=tuple(graph("recurrent", bucket, EVIL, MOST) for bucket in range(1, 200)),
)


def observed(identity: str, *, target: str = "h200") -> ObservedRecord:
    """Of an artifact of `tests.artifact_maker`: one graph right, one wrong."""
    keys = tuple(
        ObservedKey(
            program=program, bucket=bucket, mode="dense", variant="", patterns=2, bit_equal=right, error=0.25,
            graph_us=812.5, launch_us=1625.0,
        )
        for program, bucket, right in (("prelude", 1, True), ("recurrent", 2, False))
    )  # fmt: skip
    device = DeviceRecord(name="NVIDIA H200", capability=(9, 0), sm_count=132, memory=1 << 37, cuda=(13, 0))
    return ObservedRecord(identity=identity, target=target, device=device, keys=keys)


def write_observed(artifact: Path) -> Path:
    """Put the record of a warm-up beside `artifact`."""
    opened = open_artifact(artifact, "sizes")
    path = opened.observed_path / "h200.json"
    path.parent.mkdir()
    path.write_bytes(encode_record(observed(opened.identity)))
    return path
