"""A sparse artifact from build to bench on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.references import slot_arithmetic
from ouro_build.artifacts.schema import schema
from ouro_build.builder.artifact_cli import cli as artifact_cli
from ouro_build.builder.build import build
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.diff import difference
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime import host_pools, timing
from ouro_build.runtime.cli import cli
from ouro_build.runtime.machine import probe
from ouro_build.runtime.reference import ReferenceExecutor
from ouro_build.runtime.worker import load

pytestmark = pytest.mark.skipif(not probe().reason, reason="these are about a machine without a GPU")

ALL = ("dense", "capture", "consume", "mixed")
PROMPTS = [[1, 2, 3, 4, 5], [9]]


def made(folder: Path, cache: ImageCache, sparse: SparseSpec | None) -> Path:
    spec = BuildSpec(
        "preset:tiny", find_parts(["sm_90"]), (2,), (16,), max_context=64, dtype="float32", sparse=sparse or SparseSpec()
    )
    return build(prepare(spec), folder / "tiny.ouro", cache=cache, workers=2).path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, image_cache: ImageCache) -> Path:
    return made(tmp_path_factory.mktemp("sparse"), image_cache, SparseSpec(ALL, 0.1))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, image_cache: ImageCache) -> Path:
    return made(tmp_path_factory.mktemp("dense"), image_cache, None)


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", "sparse", *map(str, arguments)], standalone_mode=False)


def test_a_worker_decodes_sparsely_unless_told_not_to(artifact: Path, dense: Path) -> None:
    with load(dense) as worker:
        assert not worker.sparse
        want = [o.ids for o in worker.generate(PROMPTS, 12, ignore_eos=True)]
    with load(artifact, retained_mass=True) as worker:
        assert worker.sparse
        outputs = worker.generate(PROMPTS, 12, ignore_eos=True)
        record = worker.coverage()
        modes = {f.mode: f.count for f in record.fallbacks if f.program == "recurrent"}
        assert modes == {"dense": 11, "capture": 11, "consume": 22}
        assert record.retained_mass is not None
        model = worker.steps.model
        assert record.retained_mass.values == 2 * 11 * model.layers * model.heads
        assert [o.ids for o in worker.generate(PROMPTS, 12, ignore_eos=True, sparse=False)] == want
    assert [o.ids for o in outputs] != want, "these tokens tell nothing"
    with load(artifact, sparse="off") as worker:
        assert not worker.sparse
        assert [o.ids for o in worker.generate(PROMPTS, 12, ignore_eos=True)] == want
        assert worker.coverage().retained_mass is None


def test_the_command_line_of_run(artifact: Path, tmp_path: Path) -> None:
    prompts, coverage = tmp_path / "p.json", tmp_path / "c.json"
    prompts.write_text(json.dumps(PROMPTS))
    arguments = ["run", str(artifact), "--prompt-ids", str(prompts), "--max-tokens", "4", "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--retained-mass", "--coverage-out", str(coverage)], standalone_mode=False)
    assert json.loads(result.stdout)["sparse"] is True
    said = json.loads(coverage.read_text())
    jsonschema.Draft202012Validator(schema("coverage")).validate(said)
    assert sum(said["retained_mass"]["counts"]) == said["retained_mass"]["values"] > 0
    result = CliRunner().invoke(cli, [*arguments, "--sparse", "off"], standalone_mode=False)
    assert json.loads(result.stdout)["sparse"] is False
    result = CliRunner().invoke(cli, ["selftest", str(artifact)], standalone_mode=False)
    assert result.return_value == 0, result.output


def test_retained_mass_is_refused_where_nothing_is_captured(
    artifact: Path, dense: Path, tmp_path: Path, image_cache: ImageCache, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.json"
    prompts.write_text(json.dumps(PROMPTS))
    coverage = ["--coverage-out", str(tmp_path / "c.json")]
    arguments = ["--prompt-ids", str(prompts), "--max-tokens", "4", "--retained-mass", *coverage]
    everything = made(tmp_path, image_cache, SparseSpec(ALL, 1.0))
    for wrong, what, hint in (
        (["run", str(dense)], f"{dense} was built without sparse modes", "--sparse-modes"),
        (["run", str(everything)], f"{everything} retains every key", "R below 1"),
        (["run", str(artifact), "--sparse", "off"], "given beside --sparse off", "Leave one out"),
    ):
        assert exit_code(cli, [*wrong, *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --retained-mass: {what}")
        assert hint in said.splitlines()[-1]
    assert exit_code(cli, ["run", str(artifact), *arguments[:-2]]) == 2
    assert "Give --coverage-out FILE." in capsys.readouterr().err
    assert exit_code(cli, ["bench", "sparse", str(everything), "--rows", "1", "--context", "8", "--retained-mass"]) == 2


def test_inspect_and_diff_show_what_is_retained_and_where(artifact: Path, dense: Path) -> None:
    result = CliRunner().invoke(artifact_cli, ["inspect", str(artifact)], standalone_mode=False)
    model, geometry = open_artifact(artifact, "sizes").manifest.model, open_artifact(artifact, "sizes").manifest.geometry
    assert "0.1 of a row's keys, room for 7" in result.stdout
    assert slot_arithmetic(model, geometry.key_capacity, geometry.reference_slots) in result.stdout
    assert "references" in result.stdout
    assert "recurrent/mixed/no_capture" in result.stdout
    changed = {c.what for c in difference(open_artifact(dense, "sizes"), open_artifact(artifact, "sizes")).fields}
    assert {"geometry.sparse_modes", "geometry.key_retention", "geometry.key_capacity", "geometry.reference_slots"} <= changed


def test_bench_checks_every_mode_then_times(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUDGET", 0.0)
    result = bench(artifact, "--rows", "1,2", "--context", "40", "--retained-mass", "--json")
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    jsonschema.Draft202012Validator(schema("bench_sparse")).validate(said)
    checked = [(c["program"], c["mode"], c["variant"]) for c in said["checks"]]
    forms = [(mode, "") for mode in ALL] + [("mixed", "no_capture")]
    assert checked == [
        *(("recurrent", *form) for form in forms),
        *(("uniform", "mixed", variant) for variant in ("", "no_capture")),
        *(("step", mode, "") for mode in ("dense", "sparse") * 2),
    ]
    assert all(c["right"] for c in said["checks"])
    assert [(line["rows"], line["context"], line["retained"]) for line in said["lines"]] == [(1, 40, 4), (2, 40, 4)]
    for line in said["lines"]:
        assert line["ratio"] == pytest.approx(line["sparse_ms"] / line["dense_ms"])
        assert line["attention_ratio"] == pytest.approx(line["attention_sparse_ms"] / line["attention_dense_ms"])
        assert line["attention_dense_share"] > 0
        assert line["mass_ms"] > 0
        assert 0.1 < line["mass"] < 1


def test_usual_shapes_without_room_are_left_out(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BUDGET", 0.0)
    result = bench(artifact)
    assert result.return_value == 0, result.output
    assert "sparse over dense by reference on the host" in result.stdout
    assert "64" in result.stdout


class Wrong(ReferenceExecutor):
    """After every mixed loop the first row's hidden state is another."""

    def run(self, key: ProgramKey) -> None:
        super().run(key)
        if key.mode == "mixed":
            hidden = next(b for b in self._index.buffers if b.name == "hidden")
            self._arenas[hidden.pool][hidden.offset + 3 : hidden.offset + hidden.bytes : 4] ^= 0x80


def test_nothing_is_timed_where_mixed_rows_differ_from_uniform_ones(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pools, "ReferenceExecutor", Wrong)
    result = bench(artifact, "--rows", "2", "--context", "20")
    assert result.return_value == 1
    assert "uniform/2/mixed: WRONG; bits DIFFER" in result.stdout
    assert "nothing was timed" in result.stderr


def test_a_dense_artifact_has_nothing_to_compare(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(cli, ["bench", "sparse", str(dense)]) == 2
    assert "built without mode capture" in capsys.readouterr().err
