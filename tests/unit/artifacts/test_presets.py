"""Presets, and opening weights by what a user names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ouro_build.artifacts import packed_file as packed_file_source
from ouro_build.artifacts.checkpoint import Checkpoint
from ouro_build.artifacts.errors import ArtifactError, CheckpointError, UsageError
from ouro_build.artifacts.manifest import WEIGHTS
from ouro_build.artifacts.packed_file import PackedFile
from ouro_build.artifacts.packing import WeightSource, weight_layout
from ouro_build.artifacts.presets import PRESETS, SHIPPED, find_preset, shipped_folder
from ouro_build.artifacts.synthetic import Synthetic
from ouro_build.artifacts.weight_source import open_weights
from ouro_build.artifacts.weight_stream import load_packed, write_weights
from tests.unit.artifacts.checkpoints import GOLDEN, golden_model, small_model

TINY = PRESETS["tiny"]


def pool(source: WeightSource) -> bytes:
    return b"".join(data.tobytes() for _, data in load_packed(source, TINY.model))


@pytest.fixture
def packed_file(tmp_path: Path) -> Path:
    path = tmp_path / WEIGHTS
    with path.open("wb") as out:
        write_weights(TINY.weights("bfloat16", 4), TINY.model, out)
    return path


def test_names() -> None:
    assert find_preset("some/folder") is None
    assert find_preset("preset:tiny") == TINY
    with pytest.raises(UsageError, match=r"unknown preset 'preset:huge'\nKnown: preset:ouro-1.4b, preset:ouro-2"):
        find_preset("preset:huge")
    with pytest.raises(UsageError, match=r"weights cannot be 'int8'"):
        TINY.with_dtype("int8")


def test_shipped_presets_are_folders_with_a_checkpoint() -> None:
    assert shipped_folder("preset:tiny-trained") == SHIPPED["tiny-trained"]
    assert (SHIPPED["tiny-trained"] / "model.safetensors").is_file()
    assert shipped_folder("preset:tiny") is None
    assert shipped_folder("tiny-trained") is None


def test_every_preset_has_whole_heads_and_is_synthetic() -> None:
    for preset in PRESETS.values():
        assert preset.model.heads % preset.model.kv_heads == 0
        assert preset.synthetic
        assert preset.stop_ids == (0,)


def test_open_weights(packed_file: Path) -> None:
    wanted = pool(TINY.weights("bfloat16", 4))
    for source in ("preset:tiny", str(packed_file), str(packed_file.parent)):
        assert pool(open_weights(source, TINY.model, 4)) == wanted
    assert isinstance(open_weights("preset:tiny", TINY.with_dtype("float32")), Synthetic)
    assert isinstance(open_weights(str(GOLDEN / "mha-fp32"), golden_model("mha-fp32")), Checkpoint)


def test_open_weights_refuses(tmp_path: Path, packed_file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"preset:tiny is another model"):
        open_weights("preset:tiny", small_model())
    with pytest.raises(UsageError, match=r"--weights: unknown preset"):
        open_weights("preset:none", TINY.model)
    with pytest.raises(CheckpointError, match=r"no such file or folder"):
        open_weights(str(tmp_path / "none"), TINY.model)
    with pytest.raises(CheckpointError, match=r"no such file or folder"):
        open_weights("x" * 5000, TINY.model)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        open_weights(str(GOLDEN), TINY.model)
    with pytest.raises(CheckpointError, match=r"embedding: bfloat16 .32, 2, 16, 32. at 256; for this model float32 .32, 2,"):
        open_weights(str(packed_file), TINY.with_dtype("float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_file_source, "LAYOUT", "later/1")
        with pytest.raises(CheckpointError, match=r"packed as 'blocks_16x32/1', this software reads 'later/1'"):
            open_weights(str(packed_file), TINY.model)
    with pytest.raises(CheckpointError, match=r"layout is None"):
        open_weights(str(GOLDEN / "mha-fp32" / "model.safetensors"), golden_model("mha-fp32"))


def test_the_pool_is_mapped_at_a_page(packed_file: Path) -> None:
    file = PackedFile(packed_file, TINY.model)
    assert file.data_start % 4096 == 0
    assert packed_file.stat().st_size == file.data_start + len(file.data)
    for tensor in weight_layout(TINY.model):
        part = file.data[tensor.offset : tensor.offset + tensor.bytes]
        np.testing.assert_array_equal(part, file.read(tensor, 0, tensor.elements).view(np.uint8))


def test_damaged_packed_files(packed_file: Path, tmp_path: Path) -> None:
    raw = packed_file.read_bytes()
    header = json.loads(raw[8:4096])
    other = tmp_path / "other.safetensors"

    def changed(values: dict[str, object]) -> Path:
        other.write_bytes(raw[:8] + json.dumps(values, separators=(",", ":")).encode().ljust(4088) + raw[4096:])
        return other

    names = {("norm_x" if name == "norm" else name): value for name, value in header.items()}
    with pytest.raises(ArtifactError, match=r"other.safetensors: norm: is missing"):
        PackedFile(changed(names), TINY.model, ArtifactError)
    names = {("extra" if name == "_fill.2" else name): value for name, value in header.items()}
    assert "extra" in names
    with pytest.raises(CheckpointError, match=r"other.safetensors: extra: is unexpected"):
        PackedFile(changed(names), TINY.model)
    shutil.copy(packed_file, other)
    with other.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file"):
        PackedFile(other, TINY.model)
