"""How the builder's commands draw: tables for results on stdout, a progress bar on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ouro_build.artifacts.console import rich_console
from ouro_build.artifacts.errors import OutputError

Report = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> RenderableType:
    """A table under its title; columns that hold only numbers are aligned to the right."""
    cells = [list(row) for row in rows]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        numbers = bool(cells) and all(isinstance(row[i], int | float) for row in cells)
        drawn.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(_shown(value)) for value in row))
    return stack(Text(title), drawn)


def facts(title: str, pairs: Iterable[tuple[str, object]]) -> RenderableType:
    """Names and values under their title, one pair a line."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    drawn.add_column()
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        drawn.add_row(Text(name), Text(_shown(value)))
    return stack(Text(title), drawn)


def stack(*parts: RenderableType) -> Group:
    """Parts one under another."""
    return Group(*parts)


@contextmanager
def progress(label: str, *, shown: bool = True) -> Iterator[Report]:
    """A bar on stderr while the block runs, where stderr is a terminal and `shown`."""
    console = rich_console(sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def write_file(path: Path, data: bytes) -> None:
    """Write all of `data` to `path`, or nothing, and the folder that it is in. Raises OutputError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OutputError(f"cannot be written: {error.strerror}", where=str(path)) from error


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal, or that no font has, as an escape."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return printable(", ".join(str(v) for v in value))
    return printable(str(value))
