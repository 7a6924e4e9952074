"""A report as one page that works from disk: nothing in it is fetched, and nothing in it runs."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ouro_build.builder.output import printable
from ouro_build.builder.report.page import Page


def draw_html(page: Page) -> str:
    """The page as HTML. Text from records is escaped, and what could not be seen is spelt out."""
    environment = Environment(
        loader=PackageLoader("ouro_build.templates", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters["px"] = lambda value: _plain(value, 2)
    environment.filters["share"] = lambda value: _plain(value, 4) + "%"
    return environment.get_template("report.html.j2").render(page=page)


def _plain(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def _visible(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
