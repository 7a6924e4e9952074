"""The advisor: its prediction is what a worker counts, and its choice cannot be beaten."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import CoverageRecord, GraphSize, StepCount, encode_record
from ouro_build.builder import cli as build_cli
from ouro_build.builder.advise import DECODE_PROGRAMS, advise
from ouro_build.builder.artifact_cli import cli
from ouro_build.builder.budget import NODE_BYTES
from ouro_build.builder.choose_buckets import Rank, choose_buckets
from ouro_build.builder.predict import Shape, predict, recorded, shapes
from ouro_build.builder.spec import MAX_REQUESTS, BuildSpec, find_parts
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.step import Steps
from tests.reference_worker import reference_worker

bucket_sets = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(lambda b: tuple(sorted(b)))
loads = st.dictionaries(st.tuples(st.integers(1, 400), st.integers(1, 3)), st.integers(1, 60), min_size=40, max_size=150)
step_lists = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=12)


class Graphs:
    """An executor with every graph, which computes nothing."""

    name: ExecutorName = "graph"

    def has(self, key: ProgramKey) -> bool:
        return True

    def run(self, key: ProgramKey) -> None:
        pass

    def close(self) -> None:
        pass


def record_of(buckets: Sequence[int], steps: Sequence[StepCount], mode: str = "dense") -> CoverageRecord:
    graphs = [
        GraphSize(program=program, bucket=bucket, mode=mode, variant="", nodes=10 if program == "recurrent" else 1)
        for program in DECODE_PROGRAMS
        for bucket in buckets
    ]
    return CoverageRecord(keys=(), fallbacks=(), steps=tuple(steps), graphs=tuple(graphs))


def steps_of(*counts: tuple[int, int]) -> list[StepCount]:
    """(rows, count) of steps of four loops."""
    return [StepCount(mode="dense", rows=rows, loops=4, count=count) for rows, count in counts]


@settings(max_examples=25)
@given(bucket_sets, step_lists)
def test_the_prediction_is_what_a_worker_counts(buckets: tuple[int, ...], load: list[tuple[int, int]]) -> None:
    """Over a worker's own steps, whatever the buckets: every figure, exactly."""
    made = reference_worker("preset:tiny", buckets=buckets, prefill_buckets=(4,), max_context=32, max_requests=12)
    declared = record_of(buckets, ()).graphs
    counter = CoverageCounter(declared)
    buffers = {b.name: b for b in made.preparation.targets[0].index.buffers}
    dispatcher = Dispatcher((Graphs(),), counter, None, {})
    steps = Steps(made.steps.model, made.steps.geometry, buffers, made.memory, dispatcher, counter)
    for rows, loops in load:
        steps.submit_decode([RowInput(slot) for slot in range(rows)], depth=loops)
    record = counter.record()
    assert sum(s.count for s in record.steps) == len(load)
    outcome = predict(shapes(record.steps), record.buckets)
    assert outcome == recorded(record)
    assert outcome.share == pytest.approx(record.share)
    assert outcome.padded_share == pytest.approx(record.padded_share)
    assert outcome.replays_a_step == pytest.approx(record.replays_a_step)


def rank(steps: Mapping[Shape, int], buckets: tuple[int, ...]) -> Rank:
    """How good `buckets` are for `steps`: fewest wasted rows, then fewest replays, then fewest and smallest buckets."""
    outcome = predict(steps, buckets)
    return outcome.wasted_rows, outcome.replays, len(buckets), buckets


@given(
    st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 3)), st.integers(0, 60), min_size=1, max_size=7),
    st.integers(1, 5),
    st.integers(1, 9),
)
def test_no_other_set_is_better(load: dict[tuple[int, int], int], count: int, largest: int) -> None:
    if not any(load.values()):
        with pytest.raises(UsageError, match="no decode step is recorded"):
            choose_buckets(load, count, largest)
        return
    found = choose_buckets(load, count, largest)
    every = (c for k in range(1, count + 1) for c in combinations(range(1, largest + 1), k))
    assert rank(load, found)[:3] == min(rank(load, other) for other in every)[:3]
    assert len(found) <= count
    assert found == tuple(sorted(set(found)))


def least_waste(load: Mapping[Shape, int], count: int, top: int) -> int:
    """The fewest rows that at most `count` buckets waste, the largest of them `top`: by trying every way, size by size."""
    loops: dict[int, int] = {top: 0}
    split = 0
    for (rows, depth), times in load.items():
        split += rows * depth * times if rows > top else 0
        left = rows if rows <= top else rows % top
        loops[left] = loops.get(left, 0) + depth * times
    sizes = sorted(loops.keys() - {0})
    least = [0, *[1 << 60] * len(sizes)]
    answer = 1 << 60
    for _ in range(count):
        grown = [1 << 60] * len(least)
        for j in range(1, len(least)):
            pads = 0
            for i in range(j - 1, -1, -1):
                pads += loops[sizes[i]] * (sizes[j - 1] - sizes[i])
                grown[j] = min(grown[j], least[i] + pads)
        least = grown
        answer = min(answer, least[-1])
    return split + answer


@settings(max_examples=20, deadline=None)
@given(loads, st.integers(1, 6), st.sampled_from((30, 60)))
def test_no_set_is_better_where_there_are_many_sizes(load: dict[Shape, int], count: int, largest: int) -> None:
    found = choose_buckets(load, count, largest)
    assert predict(load, found).wasted_rows == min(least_waste(load, count, top) for top in range(1, largest + 1))


def test_thousands_of_shapes_in_a_short_time() -> None:
    load = {(rows, 4): 1 + rows % 7 for rows in range(1, 4097)}
    began = time.process_time()
    found = choose_buckets(load, 8, 1024)
    assert time.process_time() - began < 10  # 1 s where this was written, on a busy core
    assert found == (125, 251, 377, 503, 629, 762, 895, 1022)


def test_many_shapes_in_a_short_time() -> None:
    load = {(rows, 4): 1 + rows % 7 for rows in range(1, 513)}
    found = choose_buckets(load, 8, 1024)
    assert (len(found), found[-1]) == (8, 512)
    assert predict(load, found).padded_share < predict(load, (1, 4, 16, 64, 128, 256, 384, 512)).padded_share


def test_a_rare_large_step_is_split_rather_than_every_other_one_padded() -> None:
    record = record_of((16,), steps_of((1, 1000), (16, 1)))
    advice = advise(record)
    assert advice.buckets == (1,)
    assert advice.flags == "--buckets 1 --max-requests 16"
    assert (advice.before.split_steps, advice.after.split_steps) == (0, 1)
    assert advice.before.padded_share == pytest.approx(15 * 1000 / (16 * 1001))
    assert advice.after.padded_share == 0
    assert advice.after.replays_a_step == pytest.approx(4 * 1016 / 1001)


def test_modes_share_buckets_and_budgets_count_the_graphs_of_all() -> None:
    sparse = record_of((1, 2, 8), [StepCount(mode="consume", rows=5, loops=2, count=7)], "consume")
    dense = record_of((1, 2, 8), steps_of((3, 10)))
    both = msgspec.structs.replace(dense, steps=dense.steps + sparse.steps, graphs=dense.graphs + sparse.graphs)
    advice = advise(both)
    assert (advice.buckets, advice.after.padded_rows) == ((3, 5), 0)
    assert (advice.allowed, advice.graphs_a_bucket, advice.bytes_a_bucket) == (3, 12, 30 * NODE_BYTES)
    assert advise(both, max_graphs=23).buckets == (5,)
    assert advise(both, max_graphs=24).buckets == (3, 5)
    assert advise(both, memory=60 * NODE_BYTES - 1).buckets == (5,)
    assert advise(both, max_graphs=99, memory=60 * NODE_BYTES).buckets == (3, 5)
    with pytest.raises(UsageError, match=r"--max-graphs: no room for one bucket, which takes 12 graphs of about 240.00 KiB"):
        advise(both, max_graphs=11)
    with pytest.raises(UsageError, match="--memory: no room for one bucket"):
        advise(both, memory=1)


def test_no_more_requests_are_advised_than_a_build_takes() -> None:
    advice = advise(record_of((8,), steps_of((8, 1000), (MAX_REQUESTS + 1, 1))))
    assert advice.flags == f"--buckets 8 --max-requests {MAX_REQUESTS}"
    BuildSpec("preset:tiny", find_parts(["h200"]), advice.buckets, max_requests=advice.max_requests)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (record_of((1, 2), ()), "no decode step is recorded"),
        (record_of((), steps_of((1, 1))), "graphs: no graph of a decode loop is declared"),
        (record_of((1,), [StepCount(mode="", rows=1 << 20, loops=1024, count=(1 << 53) - 1)]), "more rows than a worker can"),
    ],
)
def test_records_that_tell_nothing_are_refused(record: CoverageRecord, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        advise(record)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(encode_record(record_of((1, 8), steps_of((3, 90), (7, 10)))))
    assert exit_code(cli, ["advise", str(file)]) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[-1].strip(), err) == ("--buckets 3,7", "")
    assert re.search(r"padded share +0.00% +57.50% +0.00%", out)
    assert exit_code(cli, ["advise", str(file), "--max-graphs", "6", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["flags"] == "--buckets 3 --max-requests 7"
    assert said["advice"]["after"]["split_steps"] == 10
    assert said["after"]["share"] == pytest.approx(270 / 340, abs=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "not a record of this kind"),
        (b'{"schema":"ouro-coverage/1","keys":[],"fallbacks":[]}', "ouro-coverage/2"),
        (b'{"schema":"ouro-startup/1","wall_s":1,"phases":[]}', "ouro-coverage/2"),
        (b"[" * 100_000, "not a record of this kind"),
        (b" " * ((16 << 20) + 1), "larger than 16,777,216 bytes"),
    ],
)
def test_files_that_are_no_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    file = tmp_path / "c.json"
    if content is not None:
        file.write_bytes(content)
    build = ["--model", "preset:tiny", "--gpu", "h200", "--dry-run", "-o", str(tmp_path / "o"), "--buckets", f"@{file}"]
    for command, arguments in ((cli, ["advise", str(file)]), (build_cli.cli, build)):
        assert exit_code(command, arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert str(file) in err


@pytest.mark.parametrize(("more", "requests"), [([], 9), (["--max-requests", "4"], 4)])
def test_a_build_takes_the_record_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], requests: int
) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(encode_record(record_of((1, 16), steps_of((2, 500), (4, 500), (9, 1)))))
    arguments = ["--model", "preset:tiny", "--gpu", "h200", "--dry-run", "-o", str(tmp_path / "o"), "--buckets", f"@{file}"]
    assert exit_code(build_cli.cli, [*arguments, *more]) == 0
    out, err = capsys.readouterr()
    assert err == f"--buckets 2,4 --max-requests {requests}, advised by {file}\n"
    assert re.search(r"buckets +2, 4; prompt chunks", out)
    assert re.search(rf"requests +{requests} of up to", out)
