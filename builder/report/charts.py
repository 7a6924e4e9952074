"""Charts as shapes. Widths are percent, so that a chart fills a phone as it does a desk; heights and text are pixels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple
from unicodedata import east_asian_width

from ouro_build.builder.output import printable
from ouro_build.builder.report.numbers import compact, drawable
from ouro_build.builder.report.page import Chart, Shape

MOST_ROWS = 40
"""Rows that a chart draws; its table has all."""
_PHONE = 350
"""Pixels across that a chart has on a phone: a label and its note must fit beside each other."""
_NOTE = 190
_BAR, _LABEL_ROOM, _GAP, _CLOSE = 14, 24, 6, 1
_MOST_COLUMNS = 256
MOST_BUCKETS = 64
"""Columns that a grid draws."""


class Segment(NamedTuple):
    """A part of a bar, as long as `value`."""

    value: float
    style: str
    label: str


class Bar(NamedTuple):
    """A bar under its label; `note` stands at the right end of the label's line. It begins at `start`.

    One without a label belongs to the bar above it.
    """

    label: str
    note: str
    segments: tuple[Segment, ...]
    start: float = 0.0
    indent: int = 0


class Point(NamedTuple):
    """A point of a scatter."""

    x: float
    y: float
    style: str
    label: str


def bars(
    title: str,
    rows: Sequence[Bar],
    *,
    scale: float = 0.0,
    ticks: Mapping[float, str] | None = None,
    legend: tuple[tuple[str, str], ...] = (),
    height: float = _BAR,
) -> Chart:
    """Horizontal bars to one scale: `scale` is the value of the full width, the longest bar's if 0. `ticks` mark values."""
    shown = rows[:MOST_ROWS]
    ends = [drawable(bar.start) + sum(drawable(s.value) for s in bar.segments) for bar in shown]
    full = max((drawable(scale), *ends, 1e-12))
    tops = [0.0, *accumulate(height + (_LABEL_ROOM if bar.label else _CLOSE) for bar in shown)]
    bottom = tops[-1]
    marks = {at: text for at, text in (ticks or {}).items() if at <= full * 1.0001}
    shapes = [Shape("line", 100 * at / full, 0, height=bottom, style="grid") for at in marks if at > 0]
    for bar, top in zip(shown, tops, strict=False):
        shapes += _bar(bar, top, full, height)
    each = math.ceil(sum(_width(text) + 12 for text in marks.values()) / _PHONE) or 1  # not more than a phone has room for
    shapes += [_tick(100 * at / full, bottom + 13, text) for at, text in [*marks.items()][::each]]
    return Chart(_cut(title, rows), bottom + (20 if ticks else 4), tuple(shapes), legend)


def ticks(full: float, unit: str = "", factor: float = 1.0) -> dict[float, str]:
    """Round values up to `full` for a scale, at most six, as text in `unit` after multiplying by `factor`."""
    if full * factor <= 0:
        return {}
    raw = full * factor / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.9999)
    return {i * step / factor: f"{i * step:.6g}{unit}" for i in range(int(full * factor / step * 1.0001) + 1)}


def columns(title: str, values: Mapping[int, int], marks: Sequence[int]) -> Chart:
    """Upright columns: how many of each number from 1 on, with lines at `marks`. Too many numbers are put together."""
    high, top = 140.0, 16.0
    last = max((*values, *marks, 1))
    wide = -(-last // _MOST_COLUMNS)
    sums: Counter[int] = Counter()
    for number, count in values.items():
        sums[(number - 1) // wide] += count
    full = max((drawable(v) for v in sums.values()), default=0.0) or 1.0
    places = -(-last // wide)
    shapes = [Shape("text", 0, 10, style="tick", label=f"up to {compact(full)}")]
    for place, count in sorted(sums.items()):
        tall = high * drawable(count) / full
        said = f"{place * wide + 1}" if wide == 1 else f"{place * wide + 1} to {(place + 1) * wide}"
        at, width = 100 * place / places, 100 / places
        shapes.append(Shape("rect", at + 0.1 * width, top + high - tall, 0.8 * width, tall, "live", f"{said}: {count:,}"))
    named = -100.0
    for mark in marks:
        at = 100 * -(-mark // wide) / places
        shapes.append(Shape("line", at, top, height=high, style="mark"))
        if at - named >= 9 and (mark == marks[-1] or 100 * marks[-1] / last - at >= 9):
            shapes.append(_tick(at, top + high + 13, str(mark)))
            named = at
    return Chart(title, top + high + 20, tuple(shapes), (("live", "steps"), ("mark", "buckets")) if marks else ())


def heat(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[int, int], float],
    *,
    wrong: set[tuple[int, int]],
) -> Chart:
    """A grid of numbers, by logarithm the darker the greater. Places that `values` lacks are empty, `wrong` ones are marked."""
    lines, columns = rows[:MOST_ROWS], columns[:MOST_BUCKETS]
    width = 100 / max(len(columns), 1)
    top = math.log1p(max((drawable(v) for v in values.values()), default=0.0)) or 1.0
    shapes: list[Shape] = []
    for number, name in enumerate(lines):
        y = 18 + number * 44
        shapes.append(Shape("text", 0, y + 12, style="label", label=_short(name, _PHONE)))
        for at, column in enumerate(columns):
            shapes += _cell(
                values.get((number, at)), top, at * width, y + 17, width, f"{name}, {column}", (number, at) in wrong
            )
    shapes += [Shape("text", (i + 0.5) * width, 11, style="tick", label=c, anchor="middle") for i, c in enumerate(columns)]
    return Chart(_cut(title, rows), 22 + len(lines) * 44, tuple(shapes), least=len(columns) * 30)


def scatter(title: str, points: Sequence[Point], x: tuple[float, str], y: tuple[float, str]) -> Chart:
    """Points over two axes from 0; `x` and `y` are (greatest value, name)."""
    height, top = 240.0, 24.0
    across, up = max(drawable(x[0]), 1e-12), max(drawable(y[0]), 1e-12)
    shapes = [
        Shape("text", 0, 12, style="tick", label=f"{y[1]} ↑"),
        Shape("text", 100, 12, style="tick", label=f"{x[1]} →", anchor="end"),
    ]
    for at, text in ticks(up).items():
        level = top + height * (1 - at / up)
        shapes += [
            Shape("line", 0, level, width=100, style="grid"),
            Shape("text", 0, level - 3, style="tick", label=compact(float(text))),
        ]
    for at, text in ticks(across).items():
        if at:
            place = 100 * at / across
            shapes += [Shape("line", place, top, height=height, style="grid"), _tick(place, top + height + 13, text)]
    for p in points:
        px, py = min(drawable(p.x) / across, 1), min(drawable(p.y) / up, 1)
        shapes.append(Shape("circle", 100 * px, top + height * (1 - py), width=5, style=p.style, label=p.label, opacity=0.75))
    return Chart(title, top + height + 20, tuple(shapes))


def _bar(bar: Bar, y: float, full: float, height: float) -> list[Shape]:
    shapes = []
    if bar.label:
        note, indent = _short(bar.note, _NOTE), 14 * bar.indent
        label = _short(bar.label, _PHONE - indent - _width(note))
        shapes = [
            Shape("text", 0, y + 13, indent, style="label", label=label),
            Shape("text", 100, y + 13, style="note", label=note, anchor="end"),
        ]
        y += _LABEL_ROOM
    y -= _GAP
    shapes.append(Shape("rect", 0, y, 100, height, style="track"))
    at = drawable(bar.start)
    for segment in bar.segments:
        value = drawable(segment.value)
        if value > 0:
            shapes.append(Shape("rect", 100 * at / full, y, 100 * value / full, height, segment.style, segment.label))
        at += value
    return shapes


def _cell(value: float | None, top: float, x: float, y: float, width: float, name: str, wrong: bool) -> list[Shape]:
    gap = width * 0.03
    if value is None:
        return [Shape("rect", x + gap, y, width - 2 * gap, 24, style="none", label=f"{name}: not built")]
    # Never so dark that the number on it could not be read.
    shade = 1.0 if wrong else 0.06 + 0.52 * math.log1p(drawable(value)) / top
    place = (x + gap, y, width - 2 * gap, 24.0)
    return [
        Shape("rect", *place, style="track"),
        Shape("rect", *place, style="bad" if wrong else "heat", label=f"{name}: {value:,.6g}", opacity=shade),
        Shape(
            "text", x + width / 2, y + 16, style="onfill" if wrong else "value", label=compact(drawable(value)), anchor="middle"
        ),
    ]


def _tick(x: float, y: float, text: str) -> Shape:
    return Shape("text", x, y, style="tick", label=text, anchor="start" if x < 3 else "end" if x > 97 else "middle")


def _width(text: str) -> float:
    """Pixels across that `text` takes, rather more than less."""
    return sum(13.0 if east_asian_width(c) in "WF" else 10.5 if c in "mwMW@%—" else 8.5 if c.isupper() else 6.8 for c in text)


def _short(text: str, room: float) -> str:
    """`text` as it can be seen, cut to `room` pixels."""
    shown = printable(text)
    if _width(shown) <= room:
        return shown
    ends = accumulate(map(_width, shown))
    return shown[: sum(end <= room - 12 for end in ends)] + "…"


def _cut(title: str, rows: Sequence[object]) -> str:
    return title if len(rows) <= MOST_ROWS else f"{title}; the first {MOST_ROWS} of {len(rows):,}, all are in the table"
