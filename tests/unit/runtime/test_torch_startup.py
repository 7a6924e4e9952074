"""The torch worker of `bench startup` has the artifact's own weights, in rows."""

from __future__ import annotations

from pathlib import Path

import torch

from ouro_build.artifacts.packing import weight_layout
from ouro_build.artifacts.reader import open_artifact
from ouro_build.runtime.torch_baseline import TorchDecoder
from ouro_build.runtime.torch_startup import _weights
from ouro_build.runtime.weights import embedded_weights
from tests.artifact_maker import MODEL, make_artifact


def test_matrices_are_what_they_were_before_packing(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "a.ouro", embedded=True))
    found = _weights(artifact, None, "cpu")
    assert all(t.is_contiguous() for t in found.values())
    packed = next(t for t in weight_layout(artifact.manifest.model) if t.name == "layers.0.gate_up")
    raw = embedded_weights(artifact).data[packed.offset : packed.offset + packed.bytes]
    stored = torch.from_numpy(raw.copy()).view(torch.bfloat16).view(packed.shape)
    gate_up = found["layers.0.gate_up"]
    rows, columns = 2 * MODEL.intermediate_size, MODEL.hidden_size
    assert gate_up.shape == (rows, columns)
    for row, column in ((0, 0), (17, 33), (rows // 2, 5), (rows - 1, columns - 1)):
        assert gate_up[row, column] == stored[row // 16, column // 32, row % 16, column % 32]


def test_a_step_runs_on_them(tmp_path: Path) -> None:
    artifact = open_artifact(make_artifact(tmp_path / "a.ouro", embedded=True))
    model = artifact.manifest.model
    cache = torch.zeros((2, model.planes, 2, model.kv_heads, 32, model.head_dim), dtype=getattr(torch, model.dtype))
    with torch.inference_mode():
        TorchDecoder(model, _weights(artifact, None, "cpu"), cache, torch.zeros(2, dtype=torch.int64)).step()
