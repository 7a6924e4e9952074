"""Opening weights by what a user names: a checkpoint folder, a packed file, a preset."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ouro_build.artifacts.checkpoint import Checkpoint
from ouro_build.artifacts.errors import CheckpointError
from ouro_build.artifacts.manifest import WEIGHTS
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packed_file import PackedFile
from ouro_build.artifacts.packing import WeightSource
from ouro_build.artifacts.presets import find_preset, shipped_folder

FLAG = "--weights"
OTHER_WEIGHTS = "Give the checkpoint (or preset and seed) of the build: ouro-artifact inspect names it."


def open_weights(source: str, model: ModelConfig, seed: int = 0) -> WeightSource:
    """The weights of `model` from a checkpoint folder, a packed file or the folder it is in, or `preset:NAME` with `seed`.

    Raises UsageError for an unknown preset, CheckpointError for what does not hold this model's weights.
    """
    try:
        return _open_weights(source, model, seed)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where, hint=error.hint or OTHER_WEIGHTS) from error


def _open_weights(source: str, model: ModelConfig, seed: int) -> WeightSource:
    shipped = shipped_folder(source)
    if shipped is not None:
        return Checkpoint(shipped, model)
    preset = find_preset(source, FLAG)
    if preset is not None:
        if msgspec.structs.replace(preset.model, dtype=model.dtype) != model:
            raise CheckpointError(f"{source} is another model than the artifact's", where=FLAG)
        return preset.weights(model.dtype, seed)
    path = Path(source)
    if os.path.isfile(source):
        return PackedFile(path, model)
    if not os.path.isdir(source):
        raise CheckpointError("no such file or folder", where=f"{FLAG} {source}")
    if (path / WEIGHTS).is_file():
        return PackedFile(path / WEIGHTS, model)
    return Checkpoint(path, model)
