"""`ouro-worker bench decode` on a machine without a GPU: checks, then times, and times nothing that is not right."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.schema import schema
from ouro_build.builder.build import build
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime import baseline, bench, host_pools, timing, torch_baseline
from ouro_build.runtime.cli import cli
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.machine import probe
from ouro_build.runtime.paths import NO_CUDA
from ouro_build.runtime.reference import ReferenceExecutor
from tests.unit.runtime.fake_driver import FakeDriver, Node, fake_images

pytestmark = pytest.mark.skipif(not probe().reason, reason="these are about a machine without a GPU")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, image_cache: ImageCache) -> Path:
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 4), (16,), max_context=64, dtype="float32")
    return build(prepare(spec), tmp_path_factory.mktemp("bench") / "tiny.ouro", cache=image_cache, workers=2).path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUDGET", 0.0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", "decode", *map(str, arguments)], standalone_mode=False)


def test_checks_then_times(artifact: Path) -> None:
    result = run(artifact, "--rows", "1,3", "--context", "33", "--json")
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("bench")).validate(said)
    assert (said["schema"], said["executor"], said["device"], said["unchecked"]) == ("ouro-bench/1", "reference", None, "")
    assert [(c["program"], c["bucket"], c["context"]) for c in said["checks"]] == [
        ("recurrent", 1, 0), ("coda", 1, 0), ("recurrent", 4, 0), ("coda", 4, 0), ("step", 1, 33), ("step", 4, 33),
    ]  # fmt: skip
    assert all(c["bit_equal"] and c["right"] for c in said["checks"])
    assert all(c["error"] <= 1 for c in said["checks"] if c["program"] != "step")
    assert [(line["rows"], line["bucket"], line["context"]) for line in said["lines"]] == [(1, 1, 33), (3, 4, 33)]
    assert all(line["ms"] > 0 and line["read_share"] > 0 for line in said["lines"])
    assert said["read_tb_s"] > 0
    assert said["baseline"] == []
    assert len(said["notes"]) == 1
    assert "only reference ran here (no_device)" in said["notes"][0]


def test_shapes_of_ones_choice_and_prompts(artifact: Path) -> None:
    result = run(artifact, "--shapes", "3x20,1x64,3x20", "--prefill", "40,7", "--json")
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("bench")).validate(said)
    assert [(line["rows"], line["context"]) for line in said["lines"]] == [(3, 20), (1, 64)]
    assert [(c["program"], c["bucket"], c["context"]) for c in said["checks"]] == [
        ("recurrent", 1, 0), ("coda", 1, 0), ("recurrent", 4, 0), ("coda", 4, 0), ("prefill", 16, 0),
        ("prompt", 16, 40), ("prompt", 16, 7), ("step", 4, 20), ("step", 1, 64),
    ]  # fmt: skip
    assert all(c["bit_equal"] and c["right"] for c in said["checks"])
    assert [(line["tokens"], line["bucket"], line["chunks"]) for line in said["prompts"]] == [(40, 16, 3), (7, 16, 1)]
    assert all(line["ms"] > 0 and line["tokens_s"] > 0 and line["tflop_s"] > 0 for line in said["prompts"])
    assert said["prompt_baseline"] == []


def test_a_table_for_people(artifact: Path) -> None:
    result = run(artifact, "--rows", "4", "--context", "64", "--prefill", "20")
    assert result.return_value == 0, result.output
    assert "prefill of one prompt by reference on the host" in result.stdout
    assert "2 × 16" in result.stdout
    assert "decode by reference on the host" in result.stdout
    assert "note: only reference ran here (no_device): it is checked against itself" in result.stderr
    assert "not checked" not in result.stderr


class Wrong(ReferenceExecutor):
    """Turns the sign of the first logit after every `coda`."""

    program, every, byte, mask = "coda", 1, 3, 0x80
    runs = 0

    def run(self, key: ProgramKey) -> None:
        super().run(key)
        if key.program == self.program:
            type(self).runs += 1
            if self.runs % self.every == 0:
                logits = next(b for b in self._index.buffers if b.name == "logits")
                self._arenas[Pool.IO][logits.offset + self.byte] ^= self.mask


class Unsteady(Wrong):
    """Another last bit every other time."""

    every, byte, mask = 2, 0, 1


class UnsteadyStep(Unsteady):
    """The same, where only whole steps can show it."""

    program = "sample"


@pytest.mark.parametrize(
    ("executor", "program", "bit_equal"), [(Wrong, "coda", True), (Unsteady, "coda", False), (UnsteadyStep, "step", False)]
)
def test_nothing_is_timed_that_is_not_right(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, executor: type[Wrong], program: str, bit_equal: bool
) -> None:
    monkeypatch.setattr(host_pools, "ReferenceExecutor", executor)
    result = run(artifact, "--rows", "1", "--context", "20", "--json")
    assert result.return_value == 1
    said = json.loads(result.stdout)
    assert (said["lines"], said["prompts"], said["read_tb_s"], said["baseline"]) == ([], [], None, [])
    assert said["torch_read_tb_s"] is None
    (wrong,) = [c for c in said["checks"] if not c["right"]]
    assert (wrong["program"], wrong["bit_equal"]) == (program, bit_equal)
    assert "nothing was timed" in result.stderr
    text = run(artifact, "--rows", "1", "--context", "20")
    assert text.return_value == 1
    assert f"{program}/1" in text.stdout
    assert "WRONG" in text.stdout
    assert "ms" not in text.stdout


class UnsteadyPrompt(ReferenceExecutor):
    """Turns a bit of the last keys after the first `prelude`, where only whole prompts can show it."""

    preludes = 0

    def run(self, key: ProgramKey) -> None:
        super().run(key)
        if key.program == "prelude":
            self._arenas[Pool.KV][-1] ^= self.preludes == 0
            self.preludes += 1


def test_nothing_is_timed_if_a_prompt_is_not_right(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pools, "ReferenceExecutor", UnsteadyPrompt)
    result = run(artifact, "--context", "20", "--prefill", "9", "--json")
    assert result.return_value == 1
    said = json.loads(result.stdout)
    assert (said["lines"], said["prompts"], said["read_tb_s"]) == ([], [], None)
    assert [(c["program"], c["bit_equal"]) for c in said["checks"] if not c["right"]] == [("prompt", False)]


def test_without_torch_it_says_what_was_not_checked(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = run(artifact, "--context", "20", "--json")
    assert result.return_value == 0, result.output
    assert "not checked against the reference: torch is not installed" in result.stderr
    said = json.loads(result.stdout)
    assert said["unchecked"] == "torch is not installed"
    assert all(c["error"] is None for c in said["checks"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--rows", "x"], 2),
        (["--rows", "0"], 2),
        (["--rows", "5"], 2),
        (["--context", "65"], 2),
        (["--context", "1,"], 2),
        (["--shapes", "1x20"], 2),
        (["--prefill", "65"], 2),
        (["--prefill", "0"], 2),
        (["--prefill", "many"], 2),
        (["--baseline", "torch"], 2),
        (["--executor", "graph"], 3),
    ],
)
def test_bad_values_have_their_exit_codes(artifact: Path, arguments: list[str], code: int) -> None:
    assert exit_code(cli, ["bench", "decode", str(artifact), "--context", "20", *arguments]) == code


@pytest.mark.parametrize("shapes", ["1", "1x", "x20", "1x20,", "1x20x3", "5x20", "0x20", "1x65", "1x0"])
def test_bad_shapes_are_wrong_usage(artifact: Path, shapes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(cli, ["bench", "decode", str(artifact), "--shapes", shapes]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --shapes: ")
    assert "--rows" not in said
    assert "--context" not in said.replace("--max-context", "")


def test_the_baseline_names_the_extra(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "find_spec", lambda name: None)
    assert exit_code(cli, ["bench", "decode", str(artifact), "--context", "20", "--baseline", "torch"]) == 1


def test_damage_is_refused_with_exit_4(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert exit_code(cli, ["bench", "decode", str(tmp_path)]) == 4


LOGITS = "linear_few"
"""The kernel that writes logits."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU whose kernels do nothing, but that logits become zero."""
    made = FakeDriver(memory=8 << 30)
    fake_images(monkeypatch)
    monkeypatch.setattr(bench, "probe", lambda device: probe(device, made))
    monkeypatch.setattr(bench, "open_driver", lambda device: open_driver(device, made))
    made.behaviours[LOGITS] = lambda api, node: write_logits(api, node, 0)
    return made


def write_logits(api: FakeDriver, node: Node, byte: int) -> None:
    """Fill all rows of what the LM head writes; the other matrices write a workspace, where it makes no difference."""
    api.view(node.arguments[3], 512 * 4).fill(byte)


def test_on_a_device_graph_and_launch_are_compared_and_the_graph_timed(artifact: Path, api: FakeDriver) -> None:
    result = run(artifact, "--rows", "1", "--context", "33,64", "--json")
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("bench")).validate(said)
    assert (said["executor"], said["target"], said["unchecked"], said["notes"]) == ("graph", "h200", NO_CUDA, [])
    assert all(c["executors"] == ["graph", "launch"] for c in said["checks"])
    assert [line["context"] for line in said["lines"]] == [33, 64]
    steps = 2 + 3 * 5  # warming up, then three batches
    programs = 4 + 4  # of a step: four loops, four once
    assert api.calls["cuGraphLaunch"] == len(bench.CHECKED) + 2 * (1 + steps) * programs + steps
    assert api.live() == {}


def test_on_a_device_reading_is_held_against_torch(artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline itself needs a GPU; here its times are made up."""
    asked: list[tuple[int, int]] = []

    def time_read(size: int, device: int) -> float:
        asked.append((size, device))
        return size / 2e12

    monkeypatch.setattr(baseline, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(torch_baseline, "time_decode", lambda *_: torch_baseline.BaselineTimes(2.0, 1.0))
    monkeypatch.setattr(torch_baseline, "time_read", time_read)
    arguments = (artifact, "--rows", "1", "--context", "33", "--baseline", "torch")
    result = run(*arguments, "--json")
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("bench")).validate(said)
    assert said["torch_read_tb_s"] == pytest.approx(2)
    assert asked == [(said["read_bytes"], 0)]
    shown = " ".join(run(*arguments).stdout.split())
    assert "(torch.sum: 2 TB/s, of which that is " in shown


def test_on_a_device_prompts_are_compared_and_timed_by_graph(artifact: Path, api: FakeDriver) -> None:
    result = run(artifact, "--rows", "1", "--context", "20", "--prefill", "40", "--json")
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    (check,) = [c for c in said["checks"] if c["program"] == "prompt"]
    assert (check["executors"], check["bit_equal"], check["context"]) == (["graph", "launch"], True, 40)
    assert [line["chunks"] for line in said["prompts"]] == [3]
    assert api.live() == {}


def test_on_a_device_a_graph_that_differs_from_its_launches_is_not_timed(artifact: Path, api: FakeDriver) -> None:
    count = iter(range(1000))
    api.behaviours[LOGITS] = lambda api, node: write_logits(api, node, next(count) % 64)
    result = run(artifact, "--rows", "1", "--context", "33")
    assert result.return_value == 1
    assert "bits DIFFER (graph, launch" in result.stdout
    assert api.live() == {}
