"""A report for a terminal: the tables, without the charts."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table as RichTable
from rich.text import Text

from ouro_build.builder.output import facts, printable, stack
from ouro_build.builder.report.page import Page, Section, Table


def draw_text(page: Page) -> RenderableType:
    """The page for people at a terminal."""
    return stack(Text(printable(page.title)), *(part for section in page.sections for part in _section(section)))


def _section(section: Section) -> Iterator[RenderableType]:
    yield Rule(Text(section.title), align="left", characters="─")
    if section.facts:
        yield facts("", section.facts)
    if section.note:
        yield Text(section.note)
    for figure in section.figures:
        yield _table(figure.table)
        if figure.note:
            yield Text(figure.note)


def _table(table: Table) -> RenderableType:
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="right" if at in table.numeric else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        drawn.add_row(*(Text(printable(cell)) for cell in row), style="bold" if number in table.bad else None)
    return stack(Text(printable(table.caption)), drawn)
