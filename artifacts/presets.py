"""Models known by name: synthetic ones to size and time a deployment before there is a checkpoint, and one that ships."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from ouro_build.artifacts.convert import WEIGHT_DTYPES
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import WeightSource
from ouro_build.artifacts.synthetic import Synthetic

PREFIX = "preset:"


class Preset(NamedTuple):
    """A model by name, and the token ids that end its texts. `synthetic`: its weights are made from a seed."""

    name: str
    model: ModelConfig
    stop_ids: tuple[int, ...]
    synthetic: bool = True

    def weights(self, dtype: str, seed: int) -> WeightSource:
        """Its weights as `dtype`. Raises UsageError for a seed out of range."""
        return Synthetic(self.with_dtype(dtype), seed, f"{PREFIX}{self.name}")

    def with_dtype(self, dtype: str | None) -> ModelConfig:
        """Its model, with weights of `dtype`, or of the preset's own. Raises UsageError for one that weights cannot have."""
        if dtype not in (None, *WEIGHT_DTYPES):
            raise UsageError(f"weights cannot be {dtype!r}", where="--dtype", hint=f"Choose one of {', '.join(WEIGHT_DTYPES)}.")
        return msgspec.structs.replace(self.model, dtype=dtype or self.model.dtype)


def _ouro(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        layers=layers,
        heads=16,
        kv_heads=16,
        head_dim=128,
        loops=4,
        max_position=65536,
        rms_norm_eps=(1e-6).hex(),
        rope_theta=(1e6).hex(),
        tied_embeddings=False,
        dtype="bfloat16",
    )


_TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=16,
    loops=4,
    max_position=2048,
    rms_norm_eps=(1e-6).hex(),
    rope_theta=(1e6).hex(),
    tied_embeddings=False,
    dtype="bfloat16",
)
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("ouro-1.4b", _ouro(24), (0,)),
        Preset("ouro-2.6b", _ouro(48), (0,)),
        Preset("tiny", _TINY, (0,)),
    )
}

SHIPPED: dict[str, Path] = {"tiny-trained": Path(__file__).parent / "shipped" / "tiny_trained"}
"""Checkpoint folders that come with the package."""


def shipped_folder(source: str) -> Path | None:
    """The checkpoint folder that `source`, `preset:NAME`, names; None for anything but a shipped checkpoint."""
    return SHIPPED.get(source.removeprefix(PREFIX)) if source.startswith(PREFIX) else None


def find_preset(source: str, where: str = "--model") -> Preset | None:
    """The synthetic preset that `preset:NAME` names; None if `source` is no preset. Raises UsageError for an unknown one."""
    if not source.startswith(PREFIX):
        return None
    preset = PRESETS.get(source.removeprefix(PREFIX))
    if preset is None:
        known = ", ".join(PREFIX + name for name in (*PRESETS, *SHIPPED))
        raise UsageError(f"unknown preset {source!r}", where=where, hint=f"Known: {known}")
    return preset
