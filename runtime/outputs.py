"""Files that a command writes beside what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from ouro_build.artifacts.errors import OutputError, UsageError


def check_writable(flag: str, path: Path | None) -> None:
    """Refuse a place that cannot be written before the run whose results would be lost with it."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else "the folder it is to be in does not exist"
        raise UsageError(what, where=f"{flag} {path}", hint="Name a file in a folder that exists.")


def write_output(path: Path, data: bytes) -> None:
    """Write all of `data`, or leave no part of it. Raises OutputError."""
    try:
        with path.open("wb") as file:
            _fill(file, path, data)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _fill(file: BinaryIO, path: Path, data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError:
        if path.is_file():
            path.unlink(missing_ok=True)
        raise
