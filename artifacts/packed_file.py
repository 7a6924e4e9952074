"""A file of packed weights, mapped, its header checked against the model that it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import CheckpointError, OuroError
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import LAYOUT, PackedTensor, pool_bytes, weight_layout
from ouro_build.artifacts.safetensors_file import FILLER, SafetensorsFile


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
