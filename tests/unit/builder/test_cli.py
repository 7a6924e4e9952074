"""`ouro-build`: what it refuses, with which exit code, and that it leaves nothing behind. Nothing is compiled here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from click.testing import CliRunner

from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.errors import CompileError
from ouro_build.artifacts.fit import Machine, fit
from ouro_build.artifacts.parts import find_part
from ouro_build.builder import build as build_module
from ouro_build.builder import cli as cli_module
from ouro_build.builder.cli import cli
from ouro_build.runtime import machine as machine_module
from ouro_build.runtime.paths import NO_CUDA
from tests.artifact_maker import base_manifest, weights_record

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "mha-fp32"
Invoke = Callable[..., tuple[int, str, str]]
GOOD = {"--model": "preset:tiny", "--gpu": "sm_90", "--buckets": "1,2"}


@pytest.fixture
def invoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run the command with changed flags (None leaves one out); returns (exit code, stdout, stderr)."""

    def run(*more: str, **changes: str | None) -> tuple[int, str, str]:
        flags = {**GOOD, "-o": str(tmp_path / "out.ouro"), **{f"--{k.replace('_', '-')}": v for k, v in changes.items()}}
        arguments = [text for name, value in flags.items() if value is not None for text in (name, value)]
        code = exit_code(cli, [*arguments, *more])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_dry_run_prints_the_plan_and_writes_nothing(invoke: Invoke, tmp_path: Path) -> None:
    code, out, _ = invoke("--dry-run", "--json", "--gpu", "rtx-5090")
    assert code == 0
    result = json.loads(out)
    assert [t["gpu"] for t in result["targets"]] == ["h200", "rtx-5090"]
    assert result["identity"] == ""
    for target in result["targets"]:
        assert target["plans"] == 17
        assert target["full_requests"] == 2
        assert target["reserve"] + target["kv_bytes"] + sum(p["bytes"] for p in target["pools"]) <= target["budget"]
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_people(invoke: Invoke) -> None:
    code, out, _ = invoke("--dry-run")
    assert code == 0
    for text in ("reserve", "weights", "kv", "total", "synthetic weights", "nothing: dry run"):
        assert text in out


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"gpu": "gtx-970"}, "--gpu"),
        ({"buckets": "0"}, "--buckets"),
        ({"buckets": "2,1"}, "--buckets"),
        ({"buckets": "1,1"}, "--buckets"),
        ({"buckets": "1,100000"}, "--buckets"),
        ({"buckets": "many"}, "--buckets"),
        ({"prefill_buckets": "9000"}, "--prefill-buckets"),
        ({"max_context": "1"}, "--max-context"),
        ({"max_context": "4096"}, "--max-context"),
        ({"max_requests": "0"}, "--max-requests"),
        ({"block_size": "12"}, "--block-size"),
        ({"dtype": "float16"}, "--dtype"),
        ({"memory": "lots"}, "--memory"),
        ({"weights": "none"}, "--weights"),
        ({"seed": "-1"}, "--seed"),
        ({"workers": "0"}, "--workers"),
        ({"model": "preset:huge"}, "--model"),
        ({"model": None}, "--model"),
        ({"gpu": None}, "--gpu"),
    ],
)
def test_values_that_a_flag_cannot_have(invoke: Invoke, tmp_path: Path, changes: dict[str, str | None], flag: str) -> None:
    code, out, err = invoke(**changes)
    assert code == 2
    assert flag in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_one_gpu_twice(invoke: Invoke) -> None:
    code, _, err = invoke("--gpu", "h200")
    assert code == 2
    assert "h200 is given twice" in err


def test_a_budget_too_small_says_for_what_by_how_much_and_which_flag(invoke: Invoke, tmp_path: Path) -> None:
    code, _, err = invoke(memory="500MiB")
    assert code == 1
    for text in (
        "--memory for --gpu h200",
        "too small by",
        "reserve",
        "weights",
        "KV of one request of 2048 tokens",
        "Raise --memory",
    ):
        assert text in err
    assert list(tmp_path.iterdir()) == []


def test_a_budget_over_the_part(invoke: Invoke) -> None:
    code, _, err = invoke(memory="1TiB")
    assert code == 1
    assert "more than h200 has" in err


def test_a_folder_that_is_no_checkpoint(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = invoke(model=str(tmp_path / "empty"))
    assert code == 1
    assert "config.json" in err


def test_a_config_that_changes_the_arithmetic(invoke: Invoke, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    code, _, err = invoke(model=str(folder))
    assert code == 1
    assert "attention_bias" in err


def test_a_truncated_checkpoint(invoke: Invoke, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = invoke(model=str(folder))
    assert code == 1
    assert "model.safetensors" in err


def test_stop_ids_outside_the_vocabulary(invoke: Invoke, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1000000}')
    code, _, err = invoke("--dry-run", model=str(folder))
    assert code == 1
    assert "1000000" in err


def test_an_output_that_exists(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "out.ouro").mkdir()
    code, _, err = invoke()
    assert code == 1
    assert "--force" in err
    assert list((tmp_path / "out.ouro").iterdir()) == []


def test_an_output_in_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [text for pair in GOOD.items() for text in pair]
    assert exit_code(cli, [*flags, "-o", str(tmp_path / "none" / "out.ouro")]) == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (OSError(28, "No space left on device"), 1, "the disk is full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (CompileError("a block needs too much", where="kernel x for --gpu h200"), 1, "a block needs too much"),
    ],
)
def test_a_build_that_fails_leaves_nothing(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int, text: str
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise failure

    monkeypatch.setattr(build_module, "compile_images", fail)
    found, out, err = invoke(cache_dir=str(tmp_path / "cache"))
    assert found == code
    assert text in err
    assert out == ""
    assert [p.name for p in tmp_path.iterdir()] == []


def test_an_output_that_is_there_is_refused_before_the_model_is_opened(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "out.ouro").mkdir()
    code, _, err = invoke(model=str(tmp_path / "no-such-model"))
    assert code == 1
    assert "exists already" in err
    assert "no such folder" in invoke("--dry-run", model=str(tmp_path / "no-such-model"))[2]


@pytest.mark.parametrize(
    ("machine", "cuda", "said"),
    [
        (Machine.absent("no CUDA driver"), True, "no CUDA driver"),
        (Machine.of_part(find_part("a10")), True, "h200: capability: expected compute capability 9.0, found 8.6 (a10)"),
        (msgspec.structs.replace(Machine.of_part(find_part("h200")), cuda=(12, 0)), True, "h200: cuda: expected a driver"),
        (Machine.of_part(find_part("h200")), False, NO_CUDA),
        (Machine.of_part(find_part("h200")), True, ""),
    ],
)
def test_what_keeps_a_build_from_being_warmed_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, cuda: bool, said: str
) -> None:
    monkeypatch.setattr(cli_module, "torch_has_cuda", lambda: cuda)
    obstacle = cli_module._obstacle(machine, fit(base_manifest(("h200",), weights_record()), machine))
    assert obstacle.startswith(said) if said else obstacle == ""


def test_a_build_whose_output_was_replaced_meanwhile_has_succeeded(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another build with --force may be exchanging or removing what is under the name."""

    def built(_: object, output: Path, **__: object) -> build_module.Built:
        output.mkdir()
        return build_module.Built(output, "its identity", base_manifest(("h200",), weights_record()), 0, 0)

    monkeypatch.setattr(build_module, "build", built)
    monkeypatch.setattr(machine_module, "probe", lambda: Machine.absent("no CUDA driver"))
    code, out, err = invoke("--json")
    assert (code, err.splitlines()[-1]) == (0, "not warmed: no CUDA driver")
    assert json.loads(out)["identity"] == "its identity"


def test_help_names_every_flag() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    shape = ("--buckets", "--prefill-buckets", "--max-context", "--max-requests", "--block-size", "--dtype", "--memory")
    rest = ("--weights", "--seed", "--workers", "--cache-dir", "--record", "--dry-run", "--force", "--json")
    for flag in ("--model", "--gpu", "-o", *shape, *rest):
        assert flag in text
