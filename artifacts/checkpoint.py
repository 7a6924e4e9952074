"""A checkpoint folder: safetensors in one file or several, checked completely before anything is read from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.config import CONFIG
from ouro_build.artifacts.convert import WEIGHT_DTYPES
from ouro_build.artifacts.errors import CheckpointError
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import PackedTensor, SourceTensor, checkpoint_tensors, read_fused
from ouro_build.artifacts.safetensors_file import SafetensorsFile
from ouro_build.artifacts.strict_json import parse_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_IGNORED = "rotary_emb.inv_freq"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Checkpoint:
    """The tensors of `folder`, mapped; a `WeightSource`.

    Raises CheckpointError, naming file and tensor, unless they are exactly those of `model`: none missing, unexpected,
    twice, of another shape, or of an element type other than bfloat16 and float32.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self.label = str(folder)
        self._files = _open(folder)
        _check(self._files, model, self.label)

    def dtype(self, name: str) -> str:
        """Element type that a tensor is stored in."""
        return self._files[name].entries[name].dtype

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A tensor as stored, read-only, bfloat16 as uint16; its pages are read when they are used."""
        file = self._files[name]
        return file.array(name).reshape(file.entries[name].shape)

    def read(self, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
        return read_fused(self._elements, tensor, start, stop)

    def _elements(self, name: str, start: int, stop: int) -> tuple[NDArray[np.generic], str]:
        return self._files[name].array(name)[start:stop], self.dtype(name)


def read_text(folder: Path, name: str) -> bytes | None:
    """A small file of a checkpoint folder; None where there is none. Raises CheckpointError if it cannot be read."""
    path = folder / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def read_folder_config(folder: Path) -> bytes:
    """`config.json` of a checkpoint folder. Raises CheckpointError if this is no checkpoint folder."""
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise CheckpointError(what, where=str(folder), hint=f"A checkpoint is a folder with {CONFIG} and {SINGLE}.")
    raw = read_text(folder, CONFIG)
    if raw is None:
        raise CheckpointError(
            f"not a checkpoint: there is no {CONFIG}",
            where=str(folder),
            hint=f"A checkpoint is a folder with {CONFIG} and {SINGLE}, or {INDEX} and its parts.",
        )
    return raw


def _open(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor."""
    if (folder / SINGLE).exists():
        return _by_tensor([SafetensorsFile(folder / SINGLE)])
    index = read_text(folder, INDEX)
    if index is None:
        raise CheckpointError(
            f"neither {SINGLE} nor {INDEX} is there",
            where=str(folder),
            hint="Other formats are not read; save the model with save_pretrained(..., safe_serialization=True).",
        )
    where = folder / INDEX
    declared = _weight_map(index, where)
    files = _by_tensor([SafetensorsFile(folder / name) for name in sorted(set(declared.values()))])
    for name in sorted(declared.keys() | files.keys()):
        inside = files[name].path.name if name in files else "no file"
        if declared.get(name) != inside:
            raise CheckpointError(f"{name} is in {inside}, the index says {declared.get(name, 'none')}", where=str(where))
    return files


def _weight_map(raw: bytes, where: Path) -> dict[str, str]:
    declared = parse_object(raw, str(where)).get("weight_map")
    if not isinstance(declared, dict) or not declared:
        raise CheckpointError("weight_map is missing, a file by tensor is expected", where=str(where))
    for name, file in declared.items():
        # A part is a file beside the index, never a path that leads elsewhere.
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise CheckpointError(f"weight_map: {name} is in {file!r}, the name of a file is expected", where=str(where))
    return declared


def _by_tensor(files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    found: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in found:
                raise file.error(f"also in {found[name].path.name}", name)
            found[name] = file
    return found


def _check(files: dict[str, SafetensorsFile], model: ModelConfig, where: str) -> None:
    wanted = {tensor.name: tensor for tensor in checkpoint_tensors(model)}
    missing = [name for name in wanted if name not in files]
    if missing:
        raise CheckpointError(f"{_few(missing)} missing: {len(wanted)} tensors are expected", where=where)
    for name, tensor in wanted.items():
        _check_tensor(files[name], tensor)
    extra = [name for name in files if name not in wanted and not name.endswith(_IGNORED)]
    if model.tied_embeddings and _HEAD in extra:
        _check_tied(files, wanted[_EMBEDDING])
        extra.remove(_HEAD)
    if extra:
        raise files[extra[0]].error(f"{_few(extra)} unexpected: the configuration has no use for it", extra[0])


def _check_tensor(file: SafetensorsFile, tensor: SourceTensor) -> None:
    entry = file.entries[tensor.name]
    if entry.shape != tensor.shape:
        raise file.error(f"shape {list(entry.shape)}, {list(tensor.shape)} expected from {CONFIG}", tensor.name)
    if entry.dtype not in WEIGHT_DTYPES:
        raise file.error(f"stored as {entry.dtype}; {' and '.join(WEIGHT_DTYPES)} are supported", tensor.name)


def _check_tied(files: dict[str, SafetensorsFile], embedding: SourceTensor) -> None:
    """Some tied checkpoints store the shared matrix twice: harmless only while both are the same."""
    head, file = files[_HEAD].entries[_HEAD], files[_EMBEDDING]
    same = (head.dtype, head.shape) == (file.entries[_EMBEDDING].dtype, embedding.shape)
    if not same or not np.array_equal(files[_HEAD].array(_HEAD), file.array(_EMBEDDING)):
        raise files[_HEAD].error(f"differs from {_EMBEDDING}, with which {CONFIG} says it is tied", _HEAD)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"
