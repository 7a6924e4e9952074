"""Files that a command writes beside what it prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ouro_build.artifacts.errors import OutputError, UsageError
from ouro_build.artifacts.places import check_outside


def check_writable(flag: str, path: Path | None, others: Mapping[str, Path | None] | None = None) -> None:
    """Refuse a place that cannot be written before the run whose results would be lost with it.

    Nor may it lie in an artifact, or be one of the `others`: files that the same command reads or writes, by their flags.
    """
    if path is None:
        return
    where = f"{flag} {path}"
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else "the folder it is to be in does not exist"
        raise UsageError(what, where=where, hint="Name a file in a folder that exists.")
    check_outside(path, where)
    for other, taken in (others or {}).items():
        if other != flag and taken is not None and taken.resolve() == path.resolve():
            raise UsageError(f"is also {other}: what is there would be lost", where=where, hint="Name another file.")


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
