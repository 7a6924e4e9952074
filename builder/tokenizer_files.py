"""The text side of a checkpoint: the small files that an artifact carries besides its weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from ouro_build.artifacts.checkpoint import read_folder_config, read_text
from ouro_build.artifacts.config import CONFIG, GENERATION_CONFIG
from ouro_build.artifacts.errors import CheckpointError, MissingExtraError
from ouro_build.artifacts.strict_json import parse_object

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", TOKENIZER_CONFIG)
# Where transformers notes from which folder of some machine a file was saved.
_ORIGINS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Files of an artifact by name, ascending: `config.json`, and where the checkpoint has them `generation_config.json`,
    `tokenizer_config.json`, the chat template, and `tokenizer.json`, which transformers makes of other tokenizers.

    Bytes are the checkpoint's own, but for notes of the folder that a file was once saved from. The same checkpoint
    gives the same bytes. Raises CheckpointError for a damaged file, MissingExtraError where transformers is needed.
    """
    found = {CONFIG: _portable(read_folder_config(folder), folder / CONFIG)}
    for name in (GENERATION_CONFIG, TOKENIZER_CONFIG, *CHAT_TEMPLATES):
        raw = read_text(folder, name)
        if raw is not None:
            found[name] = _portable(raw, folder / name) if name.endswith(".json") else raw
    tokenizer = _tokenizer(folder)
    if tokenizer is not None:
        found[TOKENIZER] = tokenizer
    return dict(sorted(found.items()))


def _portable(raw: bytes, path: Path) -> bytes:
    values = parse_object(raw, str(path))
    if not any(key in values for key in _ORIGINS):
        return raw
    kept = {key: value for key, value in values.items() if key not in _ORIGINS}
    return (json.dumps(kept, indent=2, ensure_ascii=True) + "\n").encode()


def _tokenizer(folder: Path) -> bytes | None:
    """`tokenizer.json`; None where the checkpoint has no tokenizer at all."""
    raw = read_text(folder, TOKENIZER)
    if raw is None:
        return _converted(folder) if any((folder / name).exists() for name in _OTHER_TOKENIZERS) else None
    try:
        Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain exceptions
        raise CheckpointError(f"not a tokenizer: {error}", where=str(folder / TOKENIZER)) from error
    return raw


def _converted(folder: Path) -> bytes:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f"there is no {TOKENIZER}, and making one of another tokenizer needs transformers",
            where=str(folder),
            hint="pip install 'ouro-build[build]'",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # whatever the checkpoint's tokenizer class makes of a damaged file
        raise CheckpointError(
            f"no {TOKENIZER} can be made of this tokenizer: {type(error).__name__}: {error}",
            where=str(folder),
            hint=f"Put a {TOKENIZER} into the folder, or remove the tokenizer's files to build without text.",
        ) from error
    return text.encode()
