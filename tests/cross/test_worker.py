"""`ouro-worker` and the Python API over a real artifact, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.request import urlopen

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.errors import ArtifactError, CheckpointError, FitError, RequestError, UsageError
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import CoverageRecord, Reason, StartupRecord, decode_record
from ouro_build.builder.build import build
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime import paths
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.cli import cli
from ouro_build.runtime.machine import probe
from ouro_build.runtime.metrics_option import serving_metrics
from ouro_build.runtime.paths import Choice
from ouro_build.runtime.selftest import self_test
from ouro_build.runtime.step import Steps
from ouro_build.runtime.worker import Worker, load
from tests.reference_worker import GOLDEN

CASE = GOLDEN / "mha-fp32"
pytestmark = pytest.mark.skipif(not probe().reason, reason="these are about a machine without a GPU")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, image_cache: ImageCache) -> Path:
    return make(tmp_path_factory.mktemp("worker") / "golden.ouro", image_cache, embed_weights=True)


def make(path: Path, cache: ImageCache, *, embed_weights: bool) -> Path:
    spec = BuildSpec(str(CASE), find_parts(["sm_90"]), (1, 4), (16,), max_context=128, embed_weights=embed_weights)
    return build(prepare(spec), path, cache=cache, workers=2).path


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[Path, list[dict[str, list[int]]]]:
    golden = list(json.loads((CASE / "golden.json").read_text())["prompts"].values())
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([p["ids"] for p in golden]))
    return file, golden


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=True)


def test_run_prints_ids_reasons_depths_and_both_records(
    artifact: Path, prompts: tuple[Path, list[dict[str, list[int]]]]
) -> None:
    file, golden = prompts
    result = run("run", artifact, "--prompt-ids", file, "--max-tokens", 24, "--ignore-eos", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert set(said) == {"outputs", "executor", "sparse", "coverage", "startup"}
    assert said["executor"] == "reference"
    for output, prompt in zip(said["outputs"], golden, strict=True):
        assert output == {"ids": prompt["greedy"], "text": None, "finish_reason": "length", "depths": [4] * 24}
    assert {f["reason"] for f in said["coverage"]["fallbacks"]} == {"no_device"}


def test_run_writes_logits_and_records(
    artifact: Path, prompts: tuple[Path, list[dict[str, list[int]]]], tmp_path: Path
) -> None:
    file, golden = prompts
    feed, logits, coverage, startup = (tmp_path / name for name in ("feed.json", "l.safetensors", "c.json", "s.json"))
    feed.write_text(json.dumps([p["greedy"] for p in golden]))
    result = run(
        "run", artifact, "--prompt-ids", file, "--feed-ids", feed, "--max-tokens", 24, "--ignore-eos",
        "--logits", logits, "--coverage-out", coverage, "--startup-out", startup,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    want, got = load_file(CASE / "sparse.safetensors"), load_file(logits)
    assert sorted(got) == [str(i) for i in range(len(golden))]
    for name, rows in got.items():
        assert rows.dtype == np.float32
        assert abs(rows - want[f"{name}.r1.0.logits"]).max() < 1e-4
    assert decode_record(coverage.read_bytes(), CoverageRecord, "c").fallbacks
    record = decode_record(startup.read_bytes(), StartupRecord, "s")
    top = [p for p in record.phases if not p.parent]
    assert {p.name for p in top} == {"interpreter and imports", "arguments", "load", "first token"}
    assert sum(p.seconds for p in top) <= record.wall_s + 1e-3
    assert record.accounted > 0.99
    assert {p.name for p in record.phases if p.parent == "load"} >= {
        "open and verify", "device", "wait for device", "weights", "executors", "check weights",
    }  # fmt: skip


def test_a_stop_token_is_in_ids(artifact: Path, prompts: tuple[Path, list[dict[str, list[int]]]]) -> None:
    golden = prompts[1][0]
    with load(artifact) as worker:
        (stop,) = worker.artifact.manifest.stop_ids
        (output,) = worker.generate([golden["ids"]], 24, feed=[golden["greedy"]])
    made = golden["greedy"]
    assert output.ids == (made[: made.index(stop) + 1] if stop in made else made)


def test_selftest_passes_and_sees_a_wrong_oracle(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(run("selftest", artifact, "--json").stdout)
    assert (said["passed"], said["wrong"], said["executor"]) == (True, [], "reference")
    assert said["clear"] > 0
    with load(artifact) as worker:
        oracle = worker.artifact.oracle()
        worker.generate = lambda *_, **__: [type("Output", (), {"ids": [i ^ 1 for i in oracle.greedy_ids]})]  # type: ignore[method-assign]
        seen = self_test(worker)
    assert not seen.passed
    assert len(seen.wrong) == seen.clear
    assert not msgspec.structs.replace(seen, clear=0, wrong=()).passed


def test_texts_are_printed_as_they_are_and_talk_goes_to_stderr(artifact: Path, tmp_path: Path) -> None:
    """However long a line is, a pipe gets one a prompt."""
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2], [3]]")
    result = run("run", artifact, "--prompt-ids", ids, "--max-tokens", 100, "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert [len(json.loads(line)) for line in result.stdout.splitlines()] == [100, 100]
    assert "executor reference (no_device), first token after" in result.stderr


def test_weights_by_reference_are_taken_from_the_checkpoint(tmp_path: Path, image_cache: ImageCache) -> None:
    bare = make(tmp_path / "bare.ouro", image_cache, embed_weights=False)
    golden = json.loads((CASE / "golden.json").read_text())["prompts"]["0"]
    with load(bare, weights=str(CASE)) as worker:
        assert worker.generate([golden["ids"]], 8, ignore_eos=True)[0].ids == golden["greedy"][:8]
    with pytest.raises(UsageError, match="digests of its weights"):
        load(bare)
    assert exit_code(cli, ["run", str(bare), "--prompt", "x", "--max-tokens", "1"]) == 2
    assert exit_code(cli, ["run", str(bare), "--prompt", "x", "--max-tokens", "1", "--weights", str(GOLDEN / "gqa-fp32")]) == 1
    with pytest.raises(CheckpointError) as caught:
        load(bare, weights="preset:tiny-trained")
    assert "inspect names it" in caught.value.hint


@pytest.mark.parametrize("executor", ["graph", "launch"])
def test_a_forced_device_path_is_refused_with_exit_3(artifact: Path, executor: Choice) -> None:
    with pytest.raises(FitError, match="no target of this artifact fits this machine"):
        load(artifact, executor=executor)
    assert exit_code(cli, ["run", str(artifact), "--prompt", "x", "--max-tokens", "1", "--executor", executor]) == 3


def test_without_torch_only_a_device_would_do(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    with pytest.raises(FitError, match=r"no_device.*torch"):
        load(artifact)
    assert exit_code(cli, ["run", str(artifact), "--prompt", "x", "--max-tokens", "1"]) == 3


def test_requests_that_cannot_be_served_leave_the_worker_usable(artifact: Path) -> None:
    with load(artifact, max_requests=2) as worker:
        with pytest.raises(RequestError, match="no tokenizer"):
            worker.generate(["text"], 1)
        with pytest.raises(RequestError, match=r"prompt 1: .* exceed the artifact's context of 128"):
            worker.generate([[1], [1] * 120], 9)
        for depth in (0, 5):
            with pytest.raises(RequestError, match=f"depth {depth} is outside 1 … 4"):
                worker.generate([[1]], 1, depth=depth)
        with pytest.raises(RequestError, match="2 lists of tokens to feed, 1 prompts"):
            worker.generate([[1]], 1, feed=[[1], [2]])
        before = worker.coverage()
        assert worker.generate([[1], [2], [3]], 2, ignore_eos=True)[2].finish_reason == "length"
        assert (before.keys, before.fallbacks, before.steps) == ((), (), ())
        assert [(s.mode, s.rows, s.loops, s.count) for s in worker.coverage().steps] == [("dense", 1, 4, 1), ("dense", 2, 4, 1)]
        assert worker.coverage().buckets == (1, 4)
        assert {f.reason for f in worker.coverage().fallbacks} == {Reason.NO_DEVICE}


def test_metrics_of_a_worker_as_it_runs(artifact: Path, prompts: tuple[Path, list[dict[str, list[int]]]]) -> None:
    said: list[str] = []
    with load(artifact) as worker, serving_metrics(worker, 0, said.append):
        port = int(said[0].split()[3].rstrip(":"))
        worker.generate([[1], [2], [3]], 2, ignore_eos=True)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        with pytest.raises(UsageError, match=f"--metrics-port: port {port} can't be listened on"):
            serving_metrics(worker, port, said.append).__enter__()
        info = next(line for line in text.splitlines() if line.startswith("ouro:artifact_info{"))
        assert f'identity="{worker.artifact.identity}"' in info
        assert 'reason="no_device"' in info
        assert 'vllm:generation_tokens_total{engine="0",model_name="golden.ouro"} 6.0' in text
        assert 'ouro:startup_seconds{parent="load",phase="open and verify"}' in text


def test_run_says_where_its_metrics_are(artifact: Path, prompts: tuple[Path, list[dict[str, list[int]]]]) -> None:
    result = run("run", artifact, "--prompt-ids", prompts[0], "--max-tokens", 1, "--metrics-port", 0)
    assert result.exit_code == 0, result.output
    assert re.search(r"metrics on port \d+: /metrics", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--max-tokens", "1"], 2),
        (["--max-tokens", "0", "--prompt", "x"], 2),
        (["--max-tokens", "1", "--prompt-ids", "nowhere.json"], 2),
        (["--max-tokens", "1", "--prompt", "x", "--memory", "many"], 2),
        (["--max-tokens", "1", "--prompt", "x", "--max-requests", "9"], 2),
        (["--max-tokens", "1", "--prompt", "x", "--memory", "1KiB"], 3),
        (["--max-tokens", "1", "--prompt", "x"], 1),
    ],
)
def test_bad_values_have_their_exit_codes(artifact: Path, arguments: list[str], code: int) -> None:
    assert exit_code(cli, ["run", str(artifact), *arguments]) == code


def test_id_files_that_are_not_lists_of_lists_are_refused(artifact: Path, tmp_path: Path) -> None:
    for at, text in enumerate(("[1, 2]", "{}", '[["a"]]', "[[1]")):
        file = tmp_path / f"{at}.json"
        file.write_text(text)
        assert exit_code(cli, ["run", str(artifact), "--prompt-ids", str(file), "--max-tokens", "1"]) == 2


def test_every_prompt_of_a_repeated_flag_is_run(monkeypatch: pytest.MonkeyPatch, artifact: Path) -> None:
    monkeypatch.setattr(Worker, "encode", lambda _, prompt: [len(prompt)])
    result = run("run", artifact, "--prompt", "x", "--prompt", "xy", "--max-tokens", 3, "--ignore-eos", "--json")
    assert result.exit_code == 0, result.output
    with load(artifact) as worker:
        expected = [output.ids for output in worker.generate(["x", "xy"], 3, ignore_eos=True)]
    assert [output["ids"] for output in json.loads(result.stdout)["outputs"]] == expected
    both = ["run", str(artifact), "--prompt", "x", "--prompt-ids", "x.json", "--max-tokens", "1"]
    assert exit_code(cli, both) == 2


@pytest.mark.parametrize("length", [3, 40])
def test_the_example_of_steps_decodes_what_generate_does(artifact: Path, length: int) -> None:
    prompt = [1 + at % 7 for at in range(length)]
    example = dedent((Steps.__doc__ or "").split("slot that decodes:\n")[1].split("\n\n    What is submitted")[0])
    with load(artifact) as worker:
        names = {"steps": worker.steps, "prompt": prompt, "RowInput": RowInput}
        exec(example, names)
    with load(artifact) as worker:
        assert names["tokens"] == worker.generate([prompt], 16, ignore_eos=True)[0].ids


def test_damage_is_refused_with_exit_4(artifact: Path, tmp_path: Path) -> None:
    image = next(str(p.relative_to(artifact)) for p in sorted(artifact.glob("images/*/*.cubin")))
    for name in ("weights.safetensors", "plans/h200.bin", "manifest.json", "oracle.json", "tokenizer/config.json", image):
        broken = tmp_path / name.replace("/", "-") / "a.ouro"
        shutil.copytree(artifact, broken)
        file = broken / name
        file.chmod(0o644)
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        with pytest.raises(ArtifactError) as caught:
            load(broken)
        assert "again" in caught.value.hint
        assert exit_code(cli, ["run", str(broken), "--prompt", "x", "--max-tokens", "1"]) == 4


@pytest.mark.parametrize("flag", ["--logits", "--coverage-out", "--startup-out"])
def test_a_record_that_cannot_be_written_is_an_error_that_names_it(artifact: Path, tmp_path: Path, flag: str) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2]]")
    for place, code in ((tmp_path, 2), (tmp_path / "gone" / "x", 2), (Path("/dev/full"), 1)):
        arguments = ["run", artifact, "--prompt-ids", ids, "--max-tokens", 2, flag, place]
        assert exit_code(cli, [str(a) for a in arguments]) == code
    assert Path("/dev/full").is_char_device()
    assert sorted(tmp_path.iterdir()) == [ids]


@pytest.mark.parametrize("flag", ["--logits", "--coverage-out", "--startup-out"])
def test_results_replace_neither_the_artifact_nor_one_another_nor_what_is_read(
    artifact: Path, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2]]")
    other = "--startup-out" if flag == "--coverage-out" else "--coverage-out"
    for places, problem in (
        ((flag, artifact / "weights.safetensors"), "lies in the artifact"),
        ((flag, artifact / "x.json"), "lies in the artifact"),
        ((flag, ids), "is also --prompt-ids"),
        ((flag, tmp_path / "x", other, tmp_path / "x"), "is also --"),
    ):
        arguments = ["run", artifact, "--prompt-ids", ids, "--max-tokens", 1, *places]
        assert exit_code(cli, [str(a) for a in arguments]) == 2
        assert problem in capsys.readouterr().err
    assert ids.read_text() == "[[1, 2]]"
    assert sorted(tmp_path.iterdir()) == [ids]
    open_artifact(artifact, "full")


def test_tokens_are_printed_though_a_record_cannot_be_written(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2]]")
    arguments = ["run", str(artifact), "--prompt-ids", str(ids), "--max-tokens", "2", "--ignore-eos"]
    assert exit_code(cli, [*arguments, "--startup-out", "/dev/full"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_what_is_no_list_of_prompts_is_refused_and_so_is_a_closed_worker(artifact: Path) -> None:
    with load(artifact) as worker:
        wrong: list[Any] = ["text", [[1.5]], [[True]], [["a"]], [None]]
        for prompts in wrong:
            with pytest.raises(RequestError, match="list of"):
                worker.generate(prompts, 1)
        numbers: list[Any] = [np.array([1, 2])]
        assert worker.generate(numbers, 1)[0].ids == worker.generate([[1, 2]], 1)[0].ids
    with pytest.raises(RequestError, match="the worker is closed"):
        worker.generate([[1]], 1)


def test_a_prompt_that_is_no_unicode_text_is_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(artifact) as worker:
        monkeypatch.setattr(worker, "_tokenizer", Tokenizer(BPE()))
        with pytest.raises(RequestError, match="not Unicode text"):
            worker.generate(["a\udcff"], 1)


def test_a_coverage_record_orders_graphs_and_is_read_strictly(
    artifact: Path, prompts: tuple[Path, list[dict[str, list[int]]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, record = prompts[0], tmp_path / "c.json"
    arguments = ["run", str(artifact), "--prompt-ids", str(file), "--max-tokens", "1"]
    assert exit_code(cli, [*arguments, "--coverage-in", str(record)]) == 2
    assert "--coverage-in" in capsys.readouterr().err
    for damaged in ("{}", '{"schema":"ouro-coverage/2","keys":['):
        record.write_text(damaged)
        assert exit_code(cli, [*arguments, "--coverage-in", str(record)]) == 2
        assert f"--coverage-in {record}: not a record of this kind" in capsys.readouterr().err
    assert exit_code(cli, [*arguments, "--coverage-out", str(record)]) == 0
    assert exit_code(cli, [*arguments, "--coverage-in", str(record), "--verify", "fast"]) == 0
