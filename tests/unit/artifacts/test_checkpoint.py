"""Checkpoint folders: what is read, and what is refused before anything is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ouro_build.artifacts.checkpoint import Checkpoint, read_folder_config
from ouro_build.artifacts.errors import CheckpointError
from ouro_build.artifacts.packing import checkpoint_tensors
from tests.unit.artifacts.checkpoints import (
    CASES,
    GOLDEN,
    golden_model,
    random_tensors,
    save_checkpoint,
    save_sharded,
    small_model,
)

MODEL = small_model()
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_have_the_published_tensors(case: str) -> None:
    model = golden_model(case)
    checkpoint = Checkpoint(GOLDEN / case, model)
    wanted = checkpoint_tensors(model)
    assert len(wanted) == 11 * model.layers + 5
    for tensor in wanted:
        assert checkpoint.tensor(tensor.name).shape == tensor.shape
        assert checkpoint.dtype(tensor.name) == model.dtype
    assert checkpoint.tensor(Q0).dtype == (np.uint16 if model.dtype == "bfloat16" else np.float32)


def test_values_are_the_librarys() -> None:
    checkpoint = Checkpoint(GOLDEN / "gqa-fp32", golden_model("gqa-fp32"))
    for name, values in load_file(GOLDEN / "gqa-fp32" / "model.safetensors").items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL)
    names = sorted(tensors)
    save_sharded(tmp_path, [{n: tensors[n] for n in names[i::3]} for i in range(3)])
    checkpoint = Checkpoint(tmp_path, MODEL)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)


def test_inv_freq_is_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    Checkpoint(save_checkpoint(tmp_path, tensors), MODEL)


def test_missing_tensors_are_named_and_counted(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL)
    del tensors[Q0]
    with pytest.raises(CheckpointError, match=f"{Q0} is missing: 27 tensors are expected"):
        Checkpoint(save_checkpoint(tmp_path, tensors), MODEL)
    only = {Q0: random_tensors(MODEL)[Q0]}
    with pytest.raises(CheckpointError, match=r"and 23 more are missing"):
        Checkpoint(save_checkpoint(tmp_path, only), MODEL)


def test_unexpected_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL) | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    with pytest.raises(CheckpointError, match=r"model.safetensors: model.layers.0.self_attn.q_proj.bias: .* unexpected"):
        Checkpoint(save_checkpoint(tmp_path, tensors), MODEL)


def test_misshapen_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL)
    tensors[Q0] = np.ascontiguousarray(tensors[Q0].T)
    with pytest.raises(CheckpointError, match=rf"{Q0}: shape \[24, 32\], \[32, 24\] expected"):
        Checkpoint(save_checkpoint(tmp_path, tensors), MODEL)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_other_element_types(tmp_path: Path, dtype: type[np.generic]) -> None:
    tensors = random_tensors(MODEL)
    changed = {**tensors, Q0: np.zeros(tensors[Q0].shape, dtype)}
    with pytest.raises(CheckpointError, match=f"{Q0}: stored as .*; bfloat16 and float32 are supported"):
        Checkpoint(save_checkpoint(tmp_path, changed), MODEL)


def test_tied_embeddings(tmp_path: Path) -> None:
    tied = small_model(tied_embeddings=True)
    tensors = random_tensors(tied)
    assert "lm_head.weight" not in tensors
    Checkpoint(save_checkpoint(tmp_path, tensors), tied)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing"):
        Checkpoint(tmp_path, MODEL)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    Checkpoint(save_checkpoint(tmp_path, tensors), tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head.weight: differs from model.embed_tokens.weight"):
        Checkpoint(save_checkpoint(tmp_path, tensors), tied)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL)
    save_sharded(tmp_path, [tensors, {Q0: tensors[Q0]}])
    with pytest.raises(CheckpointError, match=f"model-00002-of-00002.safetensors: {Q0}: also in model-00001-of-00002"):
        Checkpoint(tmp_path, MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q0: "model-00002-of-00002.safetensors"}, f"{Q0} is in model-00001.*index says model-00002"),
        ({Q0: None}, f"{Q0} is in model-00001-of-00002.safetensors, the index says none"),
        ({"x": "model-00001-of-00002.safetensors"}, "x is in no file"),
        ({Q0: "../model.safetensors"}, "weight_map: .* the name of a file is expected"),
        ({Q0: "/etc/passwd"}, "weight_map: .* the name of a file is expected"),
        ({Q0: 3}, "weight_map: .* the name of a file is expected"),
        ({Q0: "gone.safetensors"}, "gone.safetensors: cannot be read: No such file"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    tensors = random_tensors(MODEL)
    names = sorted(tensors, reverse=True)
    half = names.index(Q0) + 1
    where = save_sharded(tmp_path, [{n: tensors[n] for n in names[:half]}, {n: tensors[n] for n in names[half:]}])
    changed = {k: v for k, v in {**where, **changes}.items() if v is not None}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": changed}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path, MODEL)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "no"])
def test_an_index_that_is_none(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index.json: (weight_map is missing|not valid JSON)"):
        Checkpoint(tmp_path, MODEL)


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        Checkpoint(tmp_path, MODEL)
    with pytest.raises(CheckpointError, match=r"there is no config.json"):
        read_folder_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such folder"):
        read_folder_config(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"not a folder"):
        read_folder_config(tmp_path / "file")
