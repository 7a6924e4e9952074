"""What `--model` can name, and what it cannot."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ouro_build.artifacts.checkpoint import Checkpoint
from ouro_build.artifacts.errors import CheckpointError, MissingExtraError, UsageError
from ouro_build.artifacts.manifest import SourceRecord
from ouro_build.builder.source import open_source
from tests.unit.artifacts.checkpoints import GOLDEN

CASE = GOLDEN / "mha-fp32"
NAME = "some-org/looped-1.0"


def cached(cache: Path, *, leave_out: str = "") -> Path:
    """A hub cache that holds the golden case under NAME."""
    repository = cache / ("models--" + NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for name in {"config.json", "model.safetensors"} - {leave_out}:
        shutil.copy(CASE / name, snapshot / name)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_folder() -> None:
    source = open_source(str(CASE), seed=9)
    assert source.record == SourceRecord(kind="checkpoint", name="", synthetic=False, seed=0)
    assert (source.model.layers, source.model.dtype, source.stop_ids, source.folder) == (2, "float32", (0,), CASE)
    assert isinstance(source.weights, Checkpoint)
    assert open_source(str(CASE), dtype="bfloat16").model.dtype == "bfloat16"


def test_stop_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CASE, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert open_source(str(folder)).stop_ids == (2, 3)


def test_a_preset() -> None:
    source = open_source("preset:tiny", dtype="float32", seed=9)
    assert source.record == SourceRecord(kind="preset", name="tiny", synthetic=True, seed=9)
    assert (source.model.dtype, source.weights.label, source.folder) == ("float32", "preset:tiny", None)


def test_bad_values_of_flags() -> None:
    with pytest.raises(UsageError, match=r"--model: unknown preset 'preset:big'\nKnown: preset:ouro-1.4b"):
        open_source("preset:big")
    with pytest.raises(UsageError, match=r"--seed"):
        open_source("preset:tiny", seed=-1)
    for source in ("preset:tiny", str(CASE)):
        with pytest.raises(UsageError, match=r"--dtype"):
            open_source(source, dtype="int4")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    for name in ("none/such/folder", str(tmp_path / "none"), "gpt2", "./none", "x" * 5000):
        with pytest.raises(CheckpointError, match=r"no such folder"):
            open_source(name)
    with pytest.raises(CheckpointError, match=r"not a folder"):
        open_source(str(CASE / "config.json"))
    with pytest.raises(CheckpointError, match=r"not a checkpoint: there is no config.json"):
        open_source(str(tmp_path))
    values = json.loads((CASE / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**values, "attention_bias": True}))
    with pytest.raises(CheckpointError, match=r"config.json: attention_bias is True"):
        open_source(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        open_source(str(tmp_path))


def test_a_hub_model_in_the_cache(cache: Path) -> None:
    snapshot = cached(cache)
    source = open_source(NAME)
    assert source.record == SourceRecord(kind="hub", name=NAME, synthetic=False, seed=0)
    assert source.folder is not None
    assert source.folder.samefile(snapshot)


@pytest.mark.parametrize("leave_out", ["config.json", "model.safetensors"])
def test_an_incomplete_cache_asks_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch, leave_out: str) -> None:
    snapshot = cached(cache, leave_out=leave_out)
    asked = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append((name, local_files_only))
        if not local_files_only:
            shutil.copy(CASE / leave_out, snapshot / leave_out)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_source(NAME).folder == snapshot
    assert asked == [(NAME, True), (NAME, False)]


def test_a_hub_model_that_is_not_to_be_had(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=f"--model {NAME}: not in the local cache, and not to be had"):
        open_source(NAME)
    cached(cache, leave_out="model.safetensors")
    with pytest.raises(CheckpointError, match=r"not in the local cache|neither model.safetensors nor"):
        open_source(NAME)

    def refused(name: str, *, local_files_only: bool = False, **_: object) -> str:
        raise LocalEntryNotFoundError("not here") if local_files_only else TimeoutError("no answer\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(CheckpointError, match=r"TimeoutError: no answer\nCheck the name, the network"):
        open_source(NAME)


def test_without_the_hubs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ouro-build\[build\]'"):
        open_source(NAME)
