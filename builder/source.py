"""What `--model` names: a checkpoint folder, a model of the hub, or a preset."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ouro_build.artifacts.checkpoint import INDEX, SINGLE, Checkpoint, read_folder_config, read_text
from ouro_build.artifacts.config import CONFIG, GENERATION_CONFIG, read_config, stop_ids
from ouro_build.artifacts.errors import CheckpointError, MissingExtraError
from ouro_build.artifacts.manifest import SourceRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import WeightSource
from ouro_build.artifacts.presets import PREFIX, Preset, find_preset, shipped_folder
from ouro_build.artifacts.strict_json import parse_object

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
# Everything that a build reads; in particular no other weight formats, and no code.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True)
class Source:
    """A model to build from. `folder` holds its configuration and tokenizer; a synthetic preset has none."""

    model: ModelConfig
    weights: WeightSource
    record: SourceRecord
    stop_ids: tuple[int, ...]
    folder: Path | None


def open_source(source: str, *, dtype: str | None = None, seed: int = 0) -> Source:
    """Resolve and check `source`; `dtype` replaces the checkpoint's own, `seed` makes a preset's weights.

    An existing path is a folder before it is a hub id. Raises UsageError for an unknown preset, dtype or seed,
    CheckpointError for a folder or hub model that cannot be used, MissingExtraError where the hub's client is missing.
    """
    shipped = shipped_folder(source)
    if shipped is not None:
        return _from_folder(shipped, dtype, "preset", source.removeprefix(PREFIX))
    preset = find_preset(source)
    if preset is not None:
        return _from_preset(preset, dtype, seed)
    if not os.path.exists(source) and _HUB_ID.fullmatch(source):
        return _from_folder(_fetch(source), dtype, "hub", source)
    if not os.path.exists(source):
        raise CheckpointError(
            "no such folder",
            where=f"--model {source}",
            hint=f"Give a checkpoint folder, a hub id (org/name), or {PREFIX}NAME.",
        )
    return _from_folder(Path(source), dtype, "checkpoint", "")


def _from_preset(preset: Preset, dtype: str | None, seed: int) -> Source:
    model = preset.with_dtype(dtype)
    record = SourceRecord(kind="preset", name=preset.name, synthetic=preset.synthetic, seed=seed)
    return Source(model, preset.weights(model.dtype, seed), record, preset.stop_ids, None)


def _from_folder(folder: Path, dtype: str | None, kind: Literal["checkpoint", "hub", "preset"], name: str) -> Source:
    raw = read_folder_config(folder)
    model = read_config(raw, str(folder / CONFIG), dtype)
    ends = stop_ids(raw, read_text(folder, GENERATION_CONFIG))
    record = SourceRecord(kind=kind, name=name, synthetic=False, seed=0)
    return Source(model, Checkpoint(folder, model), record, ends, folder)


def _fetch(name: str) -> Path:
    """The folder of a hub model: from the local cache where it is complete, else downloaded."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtraError(
            "models of the hub need the package huggingface_hub",
            where=f"--model {name}",
            hint="pip install 'ouro-build[build]'",
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=_WANTED, local_files_only=True))
        if _complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # the client's errors come from whichever HTTP library it uses
        raise CheckpointError(
            f"not in the local cache, and not to be had from the hub: {type(error).__name__}: {error}".splitlines()[0],
            where=f"--model {name}",
            hint="Check the name, the network, HF_HUB_OFFLINE and HF_TOKEN, or give a checkpoint folder.",
        ) from error


def _complete(folder: Path) -> bool:
    """Whether a cached snapshot has all of the model: a cache may hold a part of it."""
    if not (folder / CONFIG).exists():
        return False
    if (folder / SINGLE).exists():
        return True
    index = read_text(folder, INDEX)
    if index is None:
        return False
    parts = parse_object(index, str(folder / INDEX)).get("weight_map")
    return isinstance(parts, dict) and all((folder / str(part)).exists() for part in parts.values())
