"""Checkpoints for tests: the golden ones, and small ones of any geometry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ouro_build.artifacts.config import read_config
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import checkpoint_tensors

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
CASES = ("mha-fp32", "gqa-fp32", "mha-bf16")


def golden_config(case: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / case / "config.json").read_bytes())
    return values


def golden_model(case: str, dtype: str | None = None) -> ModelConfig:
    return read_config((GOLDEN / case / "config.json").read_bytes(), dtype=dtype)


def small_model(**changes: Any) -> ModelConfig:
    values = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 40,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "loops": 3,
        "max_position": 128,
        "rms_norm_eps": (1e-6).hex(),
        "rope_theta": (1e4).hex(),
        "tied_embeddings": False,
        "dtype": "float32",
    }
    return ModelConfig(**{**values, **changes})


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    size = st.integers(1, 70)
    kv_heads = draw(st.integers(1, 3))
    return small_model(
        vocab_size=draw(size),
        hidden_size=draw(size),
        intermediate_size=draw(size),
        layers=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([16, 32, 64, 128])),
        tied_embeddings=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


def random_tensors(model: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return {t.name: random.standard_normal(t.shape, np.float32) for t in checkpoint_tensors(model)}


def save_checkpoint(folder: Path, tensors: dict[str, NDArray[Any]]) -> Path:
    """Write `tensors` as `model.safetensors` with the safetensors library."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_sharded(folder: Path, shards: list[dict[str, NDArray[Any]]]) -> dict[str, str]:
    """Write one file a shard and an index; returns the index's weight map."""
    folder.mkdir(exist_ok=True)
    where: dict[str, str] = {}
    for at, tensors in enumerate(shards):
        name = f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where
