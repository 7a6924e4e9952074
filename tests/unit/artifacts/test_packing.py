"""The packed layout, and that every way of packing gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open

from ouro_build.artifacts import weight_stream
from ouro_build.artifacts.blocks import blocked_shape
from ouro_build.artifacts.checkpoint import Checkpoint
from ouro_build.artifacts.convert import convert
from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import ArtifactError, CheckpointError
from ouro_build.artifacts.manifest import WeightsRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packed_file import PackedFile
from ouro_build.artifacts.packing import (
    ALIGNMENT,
    checkpoint_tensors,
    inv_freq,
    pool_bytes,
    weight_buffers,
    weight_layout,
)
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.weight_stream import check_layout, load_packed, write_weights
from tests.unit.artifacts.blocks import logical
from tests.unit.artifacts.checkpoints import GOLDEN, golden_model, models, random_tensors, save_checkpoint, small_model

FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)


def filled_pool(source: object, model: ModelConfig, record: WeightsRecord | None = None) -> NDArray[np.uint8]:
    pool = np.zeros(pool_bytes(model), np.uint8)
    for offset, data in load_packed(source, model, record):  # type: ignore[arg-type]
        pool[offset : offset + len(data)] = data
    return pool


def views(pool: NDArray[np.uint8], model: ModelConfig) -> dict[str, NDArray[np.generic]]:
    """Every packed tensor as the model has it."""
    return {t.name: logical(t, pool[t.offset : t.offset + t.bytes].view(DTYPES[t.dtype].storage)) for t in weight_layout(model)}


@given(models())
def test_tensors_are_aligned_disjoint_and_leave_only_alignment(model: ModelConfig) -> None:
    end = 0
    for tensor in weight_layout(model):
        assert tensor.offset % ALIGNMENT == 0
        assert 0 <= tensor.offset - end < ALIGNMENT
        elements = math.prod(tensor.matrix or tensor.shape)
        assert elements == sum(s.elements for s in tensor.sources) or not tensor.sources
        assert tensor.shape == (blocked_shape(*tensor.matrix) if tensor.matrix else tensor.shape)
        end = tensor.offset + tensor.bytes
    assert 0 <= pool_bytes(model) - end < ALIGNMENT


@given(models())
def test_every_checkpoint_tensor_is_packed_once(model: ModelConfig) -> None:
    names = [tensor.name for tensor in checkpoint_tensors(model)]
    assert len(set(names)) == len(names) == 11 * model.layers + 5 - model.tied_embeddings


def test_the_published_sizes() -> None:
    for name, tensors, parameters in (("ouro-1.4b", 269, 1_434_652_673), ("ouro-2.6b", 533, 2_667_974_657)):
        found = checkpoint_tensors(PRESETS[name].model)
        assert (len(found), sum(t.elements for t in found)) == (tensors, parameters)


def test_load_order() -> None:
    names = [t.name for t in weight_layout(small_model(layers=1))]
    layer = ["input_norm", "qkv", "o", "input_norm_2", "post_norm", "gate_up", "down", "post_norm_2"]
    assert names == ["inv_freq", "embedding", *(f"layers.0.{n}" for n in layer), "norm", "gate", "gate_bias", "lm_head"]


def test_buffers_are_the_layout() -> None:
    model = small_model()
    buffers = weight_buffers(model)
    for tensor in weight_layout(model):
        buffer = buffers[tensor.name]
        assert (buffer.pool, buffer.offset, buffer.dtype, buffer.sizes) == (
            Pool.WEIGHTS, tensor.offset, tensor.dtype, tensor.shape,
        )  # fmt: skip
    tied = weight_buffers(small_model(tied_embeddings=True))
    assert tied["lm_head"] == tied["embedding"]


def test_rotary_frequencies() -> None:
    values = inv_freq(small_model(head_dim=64))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array([1e4 ** (-2 * k / 64) for k in range(32)], np.float32))


def test_golden_tensors_lie_where_the_layout_says() -> None:
    model = golden_model("gqa-fp32")
    checkpoint = Checkpoint(GOLDEN / "gqa-fp32", model)
    found = views(filled_pool(checkpoint, model), model)
    part = "model.layers.1.self_attn.{}_proj.weight"
    qkv = np.concatenate([checkpoint.tensor(part.format(x)) for x in "qkv"])
    np.testing.assert_array_equal(found["layers.1.qkv"], qkv)
    np.testing.assert_array_equal(found["layers.2.gate_up"][256:], checkpoint.tensor("model.layers.2.mlp.up_proj.weight"))
    np.testing.assert_array_equal(found["gate"], checkpoint.tensor("model.early_exit_gate.weight")[0])
    np.testing.assert_array_equal(found["lm_head"], checkpoint.tensor("lm_head.weight"))
    np.testing.assert_array_equal(found["inv_freq"], inv_freq(model))


@given(models(), st.integers(50, 20000), st.integers(0, 3))
@FOLDER
def test_packing_and_reading_back(tmp_path: Path, model: ModelConfig, piece: int, seed: int) -> None:
    """Whatever the size of a piece, the written file holds the sources, and reading it gives the same pool again."""
    tensors = random_tensors(model, seed)
    checkpoint = Checkpoint(save_checkpoint(tmp_path, tensors), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_stream, "PIECE", piece)
        out = io.BytesIO()
        record = write_weights(checkpoint, model, out)
        path = tmp_path / "weights.safetensors"
        path.write_bytes(out.getvalue())
        pool = filled_pool(checkpoint, model, record)
        np.testing.assert_array_equal(pool, filled_pool(PackedFile(path, model), model, record))
    np.testing.assert_array_equal(PackedFile(path, model).data, pool)
    found = views(pool, model)
    for tensor in weight_layout(model):
        if tensor.sources:
            parts = [convert(tensors[s.name].reshape(-1), "float32", model.dtype) for s in tensor.sources]
            np.testing.assert_array_equal(found[tensor.name].reshape(-1), np.concatenate(parts))


@pytest.mark.parametrize("case", ["mha-fp32", "mha-bf16"])
def test_the_file_and_its_digests(tmp_path: Path, case: str) -> None:
    model = golden_model(case)
    checkpoint = Checkpoint(GOLDEN / case, model)
    out = io.BytesIO()
    record = write_weights(checkpoint, model, out)
    raw = out.getvalue()
    assert record.embedded
    assert (record.file.bytes, record.file.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert record.file.chunks == ()
    data = raw[len(raw) - record.bytes :]
    for tensor in record.tensors:
        assert hashlib.sha256(data[tensor.offset : tensor.offset + tensor.bytes]).hexdigest() == tensor.sha256
    again = write_weights(checkpoint, model, None)
    assert not again.embedded
    assert (again.file, again.tensors) == (record.file, record.tensors)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(raw)
    with safe_open(path, "numpy") as library:
        assert {t.name for t in record.tensors} <= set(library.keys())


def test_chunks_of_a_large_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "CHUNK", 10_000)
    monkeypatch.setattr(weight_stream, "CHUNKED_ABOVE", 50_000)
    preset = PRESETS["tiny"]
    out = io.BytesIO()
    record = write_weights(preset.weights("bfloat16", 0), preset.model, out)
    raw = out.getvalue()
    assert len(record.file.chunks) == math.ceil(len(raw) / 10_000) > 5
    assert record.file.chunks == tuple(hashlib.sha256(raw[i : i + 10_000]).hexdigest() for i in range(0, len(raw), 10_000))


def test_other_weights_than_the_records_are_refused() -> None:
    preset = PRESETS["tiny"]
    record = write_weights(preset.weights("bfloat16", 0), preset.model, None)
    filled_pool(preset.weights("bfloat16", 0), preset.model, record)
    with pytest.raises(CheckpointError, match=r"preset:tiny: embedding \(from model.embed_tokens.weight\) has sha256"):
        filled_pool(preset.weights("bfloat16", 1), preset.model, record)
    with pytest.raises(ArtifactError, match=r"not those of layout"):
        check_layout(record, small_model())
    with pytest.raises(ArtifactError, match=r"layout 'column' is not known"):
        check_layout(WeightsRecord(embedded=False, layout="column", bytes=0, tensors=(), file=record.file), preset.model)


def test_errors_while_writing_pass_through() -> None:
    class Full(io.RawIOBase):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    preset = PRESETS["tiny"]
    with pytest.raises(OSError, match=r"No space left"):
        write_weights(preset.weights("bfloat16", 0), preset.model, Full())  # type: ignore[arg-type]


def test_conversion_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    special = np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 0x7F800001, 0x3F808000, 0x3F818000, 1], "<u4")
    values = np.concatenate([random.integers(0, 1 << 32, 100_000, np.uint32), special]).view("<f4")
    wanted = torch.from_numpy(values.copy()).to(torch.bfloat16)
    found = torch.from_numpy(convert(values, "float32", "bfloat16").copy()).view(torch.bfloat16)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()])
    bits = np.arange(1 << 16, dtype="<u2")
    np.testing.assert_array_equal(convert(bits, "bfloat16", "float32").view("<u4"), bits.astype("<u4") << 16)


def test_a_float32_checkpoint_as_bfloat16() -> None:
    model = golden_model("mha-fp32", "bfloat16")
    checkpoint = Checkpoint(GOLDEN / "mha-fp32", model)
    found = views(filled_pool(checkpoint, model), model)["embedding"]
    wanted = convert(checkpoint.tensor("model.embed_tokens.weight"), "float32", "bfloat16")
    np.testing.assert_array_equal(found, wanted)
    assert views(filled_pool(checkpoint, model), model)["inv_freq"].dtype == np.float32
