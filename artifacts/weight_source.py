"""Opening weights by what a user names: a checkpoint folder, a packed file, a preset."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.checkpoint import Checkpoint
from ouro_build.artifacts.errors import CheckpointError, OuroError
from ouro_build.artifacts.manifest import WEIGHTS
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import LAYOUT, PackedTensor, WeightSource, pool_bytes, weight_layout
from ouro_build.artifacts.presets import find_preset, shipped_folder
from ouro_build.artifacts.safetensors_file import FILLER, SafetensorsFile

FLAG = "--weights"
OTHER_WEIGHTS = "Give the checkpoint (or preset and seed) of the build: ouro-artifact inspect names it."


class PackedFile:
    """A file of packed weights, mapped; a `WeightSource`.

    `data` is the weights pool, byte for byte, and begins `data_start` bytes into the file, at a multiple of a page.
    Raises `damaged` unless it holds exactly the packed tensors of `model`; the bytes of the tensors are not checked here.
    """

    def __init__(self, path: Path, model: ModelConfig, damaged: type[OuroError] = CheckpointError) -> None:
        file = SafetensorsFile(path, damaged)
        _check(file, model)
        self.label = str(path)
        self.data: NDArray[np.uint8] = file.data
        self.data_start = file.data_start
        self._file = file

    def read(self, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
        return self._file.array(tensor.name)[start:stop]


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


def _check(file: SafetensorsFile, model: ModelConfig) -> None:
    layout = file.metadata.get("layout")
    if layout is None:
        raise file.error(f"layout is None, a file of packed weights ({LAYOUT!r}) is expected")
    if layout != LAYOUT:
        raise file.error(f"the weights are packed as {layout!r}, this software reads {LAYOUT!r}: pack the checkpoint again")
    found = {name: entry for name, entry in file.entries.items() if not name.startswith(FILLER)}
    wanted = weight_layout(model)
    for tensor in wanted:
        entry = found.pop(tensor.name, None)
        if entry is None:
            raise file.error("is missing", tensor.name)
        if (entry.dtype, entry.shape, entry.start) != (tensor.dtype, tensor.shape, tensor.offset):
            raise file.error(
                f"{entry.dtype} {list(entry.shape)} at {entry.start}; for this model {tensor.dtype} {list(tensor.shape)} "
                f"at {tensor.offset} is expected",
                tensor.name,
            )
    if found:
        raise file.error("is unexpected", next(iter(found)))
    if len(file.data) != pool_bytes(model):
        raise file.error(f"{len(file.data)} bytes of data, {pool_bytes(model)} expected")
