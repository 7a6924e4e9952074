"""Records as files that somebody hands over: read strictly, and not without end."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.records import CoverageRecord, ObservedRecord, StartupRecord, decode_record

LARGEST = 16 << 20
"""Bytes of the largest record that is read. One of a worker with a thousand graphs is under 1 MiB."""
R = TypeVar("R", CoverageRecord, StartupRecord, ObservedRecord)


class _Envelope(msgspec.Struct):
    schema: str = ""


def read_record(path: Path, kind: type[R]) -> R:
    """The record at `path`. Raises UsageError if nothing can be read there, or no record of this kind."""
    return decode_record(_read(path), kind, str(path))


def read_any(path: Path) -> CoverageRecord | StartupRecord | ObservedRecord | None:
    """The record at `path`, by its schema; None if it is of a kind that no report shows. Raises as `read_record` does."""
    raw = _read(path)
    try:
        schema = msgspec.json.decode(raw, type=_Envelope).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        schema = "ouro-coverage/"  # no record at all: the reader says so
    where = str(path)
    match schema.partition("/")[0]:
        case "ouro-startup":
            return decode_record(raw, StartupRecord, where)
        case "ouro-observed":
            return decode_record(raw, ObservedRecord, where)
        case "ouro-coverage" | "":
            return decode_record(raw, CoverageRecord, where)
    return None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if len(raw) > LARGEST:
        raise UsageError(f"larger than {LARGEST:,} bytes, which no record is", where=str(path))
    return raw
