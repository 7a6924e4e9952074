"""What a report consists of: sections of figures, each of which is a table and may have a chart of the same numbers."""

from __future__ import annotations

from typing import Literal, NamedTuple

Anchor = Literal["start", "middle", "end"]


class Shape(NamedTuple):
    """A piece of a chart. `x` and `width` are percent of the chart's width, `y`, `height` and a circle's `width` pixels.

    `style` names a class of the style sheet; `label` is a text's text, for others what is shown when it is pointed at. The
    `width` of a text is how many pixels it is moved in.
    """

    kind: Literal["rect", "text", "circle", "line"]
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    style: str = ""
    label: str = ""
    anchor: Anchor = "start"
    opacity: float = 1.0


class Chart(NamedTuple):
    """A drawing `height` pixels high, at least `least` wide. `title` says all of it in a sentence; `legend`: (style, name)."""

    title: str
    height: float
    shapes: tuple[Shape, ...]
    legend: tuple[tuple[str, str], ...] = ()
    least: int = 0


class Table(NamedTuple):
    """Rows of text under their caption. Columns numbered in `numeric` are aligned to the right; rows in `bad` stand out."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()


class Figure(NamedTuple):
    """A table, and a chart of it if there is one."""

    table: Table
    chart: Chart | None = None
    note: str = ""


class Section(NamedTuple):
    """A part of the report. `key` is its place in the page; `note` stands for figures that cannot be shown, and says why."""

    key: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    figures: tuple[Figure, ...] = ()
    note: str = ""


class Page(NamedTuple):
    """A whole report."""

    title: str
    sections: tuple[Section, ...]


def numeric_from(first: int, columns: tuple[str, ...]) -> frozenset[int]:
    """The columns from `first` on."""
    return frozenset(range(first, len(columns)))
