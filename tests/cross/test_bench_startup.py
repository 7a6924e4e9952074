"""`ouro-worker bench startup` on a machine without a GPU: fresh processes, cold and warm, by the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.schema import schema
from ouro_build.builder.build import build
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime import first_requests, page_cache
from ouro_build.runtime.cli import cli
from ouro_build.runtime.machine import probe

pytestmark = pytest.mark.skipif(not probe().reason, reason="these are about a machine without a GPU")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, image_cache: ImageCache) -> Path:
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 4), (16,), max_context=64, dtype="float32")
    return build(prepare(spec), tmp_path_factory.mktemp("startup") / "tiny.ouro", cache=image_cache, workers=2).path


@pytest.fixture(autouse=True)
def _polite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The files of others stay in memory, and two steps stand for a hundred."""
    monkeypatch.setattr(page_cache, "DROP", tmp_path / "no" / "such")
    monkeypatch.setattr(first_requests, "TIMES", 2)


def test_cold_and_warm_starts_are_on_the_record(artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    counts = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    arguments = ["bench", "startup", str(artifact), *counts, "--output-json", str(out)]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert result.exit_code == 0, result.output
    said = json.loads(out.read_bytes())
    jsonschema.Draft202012Validator(schema("bench_startup")).validate(said)
    for kind in ("cold", "warm"):
        (run,) = said[kind]
        assert said[f"{kind}_startup_times"] == [run["wall_s"]]
        assert said[f"avg_{kind}_startup_time"] == run["wall_s"] > 0
        assert said[f"{kind}_startup_percentiles"] == dict.fromkeys(("10", "25", "50", "75", "90", "99"), run["wall_s"])
        assert run["phases"][0]["name"] == "interpreter"
        assert 0 < run["phases"][0]["seconds"] < run["wall_s"]
    assert (said["cold_by"], said["executor"], said["verify"], said["baseline"]) == ("fadvise", "reference", "full", [])
    assert 0 <= said["cold_resident"] <= 1
    assert said["accounted"] > 0.99
    assert {"interpreter", "imports", "arguments", "load", "first token", "check weights"} <= {
        p["name"] for p in said["phases"]
    }
    assert [(f["program"], f["rows"]) for f in said["first_requests"]] == [("decode", 1), ("decode", 4), ("prefill", 16)]
    assert "process start to first token" in result.stdout


def test_what_a_start_failed_of_is_what_the_command_fails_of(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "a.ouro"
    shutil.copytree(artifact, damaged)
    weights = damaged / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert exit_code(cli, ["bench", "startup", str(damaged)]) == 4
    assert "weights.safetensors" in capsys.readouterr().err


def test_the_baseline_needs_a_device(artifact: Path) -> None:
    assert exit_code(cli, ["bench", "startup", str(artifact), "--baseline", "torch"]) == 2


def test_files_are_put_out_of_memory_without_rights(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    assert page_cache.resident_share([file]) == 1.0
    assert page_cache.drop([file]) == "fadvise"
    assert page_cache.resident_share([]) == 0.0
    assert 0 <= page_cache.resident_share([file]) <= 1
