"""JSON from files that others wrote: one object, no repeated keys, and no other exception than ours."""

from __future__ import annotations

import json
from typing import Any

from ouro_build.artifacts.errors import CheckpointError, OuroError


def parse_object(raw: bytes, where: str, damaged: type[OuroError] = CheckpointError, hint: str = "") -> dict[str, Any]:
    """The JSON object in `raw`. Raises `damaged`, naming `where` and with `hint`, if it is anything else or repeats a key."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise damaged(f"not valid JSON: {error}", where=where, hint=hint) from error
    if not isinstance(value, dict):
        raise damaged(f"holds a JSON {type(value).__name__}, an object is expected", where=where, hint=hint)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is repeated")
        found[key] = value
    return found
