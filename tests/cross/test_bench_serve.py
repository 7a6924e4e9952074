"""`ouro-worker bench serve` and the first requests of a worker, over graphs on a device that does nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.geometry import SPARSE_MODES
from ouro_build.artifacts.records import CoverageRecord, decode_record
from ouro_build.artifacts.schema import schema
from ouro_build.builder.advise import advise
from ouro_build.builder.build import build
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.predict import predict, recorded, shapes
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime import bench_serve, first_requests, opening
from ouro_build.runtime.cli import cli
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.machine import probe
from ouro_build.runtime.sample_text import SampleText
from ouro_build.runtime.worker import load
from tests.unit.runtime.fake_driver import FakeDriver, fake_images


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, image_cache: ImageCache) -> Path:
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 4), (16,), max_context=64, dtype="float32")
    return build(prepare(spec), tmp_path_factory.mktemp("serve") / "tiny.ouro", cache=image_cache, workers=2).path


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver(memory=8 << 30)
    fake_images(monkeypatch)
    monkeypatch.setattr(opening, "open_driver", lambda device: open_driver(device, made))
    monkeypatch.setattr(bench_serve, "probe", lambda device: probe(device, made))
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", "serve", *map(str, arguments)], standalone_mode=False)


def test_every_request_is_served_and_every_row_is_counted(artifact: Path, api: FakeDriver, tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    result = run(artifact, "--concurrency", "1,3", "--input", "20", "--output", "6", "--coverage-out", out, "--json")
    assert result.return_value is None, result.output
    said = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("bench_serve")).validate(said)
    assert (said["executor"], said["device"]["name"], said["seed"]) == ("graph", "Fake GPU", 0)
    one, three = said["lines"]
    # A prompt of 20 takes two chunks of 16, and its last row gives the first token: five decode steps more.
    assert (one["concurrency"], one["requests"], one["steps"], one["share"], one["padded_share"]) == (1, 2, 2 * 7, 1.0, 0.0)
    assert (three["concurrency"], three["requests"], three["share"]) == (3, 6, 1.0)
    live = [sum(k["live_rows"] for k in line["coverage"]["keys"] if k["program"] == "recurrent") for line in said["lines"]]
    assert live == [2 * 5 * 4, 6 * 5 * 4], "tokens after the first, four loops each"
    for line in said["lines"]:
        assert line["output_tokens_s"] == pytest.approx(line["requests"] * 6 / line["seconds"])
        assert 0 < line["ttft_ms"]["p50"] <= line["ttft_ms"]["p99"] <= line["ttft_ms"]["max"] <= line["seconds"] * 1e3
        spent = sum(line["host"].values()) * line["steps"] / 1e6
        assert spent == pytest.approx(line["seconds"], rel=0.02)
    whole = decode_record(out.read_bytes(), CoverageRecord, "c")
    assert sum(k.live_rows for k in whole.keys if k.program == "recurrent") == sum(live)
    assert predict(shapes(whole.steps), whole.buckets) == recorded(whole), "what the advisor goes by"
    assert advise(whole).after.wasted_rows <= recorded(whole).wasted_rows
    assert api.live() == {}


def test_a_sparse_artifact_can_be_served_densely(image_cache: ImageCache, tmp_path: Path) -> None:
    sparse = SparseSpec(modes=SPARSE_MODES, key_retention=0.25)
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1,), (16,), max_context=64, dtype="float32", sparse=sparse)
    built = build(prepare(spec), tmp_path / "sparse.ouro", cache=image_cache, workers=2).path
    for choice, modes in (("auto", {"dense", "capture", "consume"}), ("off", {"dense"})):
        result = run(built, "--concurrency", "1", "--input", "20", "--output", "3", "--sparse", choice, "--json")
        said = json.loads(result.stdout)
        jsonschema.Draft202012Validator(schema("bench_serve")).validate(said)
        assert said["sparse"] == (choice == "auto")
        (line,) = said["lines"]
        assert {k["mode"] for k in line["coverage"]["keys"] if k["program"] == "recurrent"} == modes


def test_a_table_for_people(artifact: Path) -> None:
    result = run(artifact, "--concurrency", "2", "--input", "5", "--output", "1", "--requests", "3", "--metrics-port", "0")
    assert result.return_value is None, result.output
    assert "metrics on port " in result.stderr
    shown = " ".join(result.stdout.split())
    assert "5 prompt tokens, 1 new ones, dense, by graph on Fake GPU" in shown
    assert "│ prefill │ 16 │ dense │" in shown
    assert "what did not run" not in shown


def test_fallbacks_are_listed_once_with_their_rows(artifact: Path) -> None:
    result = run(artifact, "--concurrency", "1,3", "--input", "5", "--output", "3", "--executor", "launch")
    assert result.return_value is None, result.output
    assert "by graph key" not in result.stdout
    listed = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "disabled" in line]
    kinds = [(program, mode, reason, path) for program, mode, reason, path, *_ in listed]
    assert len(set(kinds)) == len(kinds) == 6, "prefill, and the five programs of a decode step"
    assert ["recurrent", "dense", "graphs_disabled", "launch", "1, 3", "32", "64"] in listed


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--concurrency", "0"], "0 is less than 1"),
        (["--concurrency", "x"], "not a list of numbers"),
        (["--concurrency", "1,99"], "99 is more than the"),
        (["--concurrency", "1", "--input", "60"], "exceed the artifact's context of 64"),
    ],
)
def test_loads_without_room_are_refused(
    artifact: Path, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(cli, ["bench", "serve", str(artifact), "--input", "8", "--output", "8", *arguments]) == 2
    assert what in capsys.readouterr().err


def test_the_first_step_of_every_shape_is_timed_before_any_second_one(
    artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_requests, "TIMES", 5)
    with load(artifact) as worker:
        allocated = api.calls["cuMemAlloc"], api.calls["cuMemHostAlloc"]
        seen: list[tuple[str, int]] = []
        run_ = worker.steps.run

        def noted(program: str, rows: int, mode: str = "dense", variant: str = "") -> None:
            seen.append((program, rows))
            run_(program, rows, mode, variant)

        monkeypatch.setattr(worker.steps, "run", noted)
        found = first_requests.first_requests(worker.steps)
        assert [(f.program, f.rows) for f in found] == [("decode", 1), ("decode", 4), ("prefill", 16)]
        assert all(f.first_ms > 0 and f.hundredth_ms > 0 and f.median_ms > 0 for f in found)
        heads = [shape for shape in seen if shape[0] == "prelude"]
        assert heads == [("prelude", n) for n in (1, 4, 16)] + [("prelude", n) for n in (1, 4, 16) for _ in range(4)]
        assert (api.calls["cuMemAlloc"], api.calls["cuMemHostAlloc"]) == allocated


def test_prompts_are_real_text_from_places_that_the_seed_chooses() -> None:
    text = SampleText(4096)
    prompts = text.prompts(5, 30, 1)
    assert prompts == text.prompts(5, 30, 1)
    assert prompts != text.prompts(5, 30, 2)
    whole = text.prompt(0, 8192)
    assert text.prompt(8190, 4) == [*whole[8190:], *whole[:2]]
    assert len(np.unique(whole)) > 500
    assert max(SampleText(100).prompt(0, 8192)) < 100


def test_locked_pages_are_given_back_after_the_first_token(artifact: Path, api: FakeDriver) -> None:
    with load(artifact) as worker:
        assert (api.calls["cuMemHostRegister"], api.calls["cuMemHostUnregister"]) == (1, 0)
        worker.generate([[1, 2, 3]], 2, ignore_eos=True)
        worker.settle()
        deadline = time.monotonic() + 10
        while not api.calls["cuMemHostUnregister"] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert api.calls["cuMemHostUnregister"] == 1
        first, wall = next(p for p in worker.startup().phases if p.name == "first token"), worker.startup().wall_s
        released = [p for p in worker.startup().phases if p.name == "release pages"]
        assert all(p.start_s >= first.start_s for p in released)
        assert first.start_s + first.seconds == pytest.approx(wall, abs=1e-3)
    worker.settle()
    assert api.calls["cuMemHostUnregister"] == 1
