"""HTML as plain text: blocks parted by an empty line, code kept as it stands, navigation left out."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_BLOCKS = {
    *("p", "div", "section", "article", "blockquote", "table", "tr", "ul", "ol", "dl", "li", "dt", "dd", "pre", "hr"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "body", "main", "figure", "caption", "details", "summary", "center"),
}
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_SKIPPED = {"script", "style", "nav", "header", "footer", "head", "svg", "form", "button", "select", "noscript", "template"}
_VOID = {"br", "hr", "img", "input", "link", "meta", "col", "area", "base", "wbr", "source"}
_NAVIGATION = {
    "sphinxsidebar",
    "related",
    "headerlink",
    "navheader",
    "navfooter",
    "footer",
    "toc",
    "toctree-wrapper",
    "contents",
    "head",
    "foot",
    "nosearch",
    "mark",
    "anchor",
    "docnav",
    "api_stability_key",
    "top",
    "seealso-list",
    "language",
    "toplang",
    "bottomlang",
    "viewcode-link",
    "sidebar",
    "breadcrumbs",
    "linenos",
    "revnumber",
    "column2",
    "gtoc",
    "path",
    "page-header",
    "menu",
}


def html_text(html: str) -> str:
    """The readable text of a page: one line a paragraph, headings after `#`, list items after `-`, cells parted by ` | `."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.text()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._blocks: list[str] = []
        self._parts: list[str] = []
        self._mark = ""
        self._pre = 0
        self._skipped = ""  # the element being left out, and how many of its name are open inside it
        self._depth = 0

    def text(self) -> str:
        self._end_block()
        joined = ""
        for before, block in zip(["", *self._blocks], self._blocks, strict=False):
            joined += (_gap(before, block) if joined else "") + block
        return joined

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._depth += tag == self._skipped
            return
        if tag not in _VOID and (tag in _SKIPPED or _is_navigation(attrs)):
            self._skipped, self._depth = tag, 1
            return
        if tag == "br":
            self._parts.append("\n" if self._pre else " ")
        elif tag in ("td", "th"):
            self._parts.append(" | " if "".join(self._parts).strip() else "")
        if tag in _BLOCKS and not self._in_cell_or_item(tag):
            self._end_block()
        if tag == "pre":
            self._pre += 1
        if tag == "li":
            self._mark = "- "
        elif tag in _HEADINGS:
            self._mark = _HEADINGS[tag]

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._depth -= tag == self._skipped
            if not self._depth:
                self._skipped = ""
            return
        if tag in _BLOCKS and not self._in_cell_or_item(tag):
            self._end_block()
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
        elif tag in _HEADINGS:
            self._mark = ""  # an empty heading leaves none behind

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._parts.append(data if self._pre else re.sub(r"\s+", " ", data))

    def _in_cell_or_item(self, tag: str) -> bool:
        """A paragraph right after its list mark or inside a table cell does not begin a line of its own."""
        return tag in ("p", "div") and (bool(self._mark) or "".join(self._parts).rstrip(" ").endswith("|"))

    def _end_block(self) -> None:
        raw = "".join(self._parts).replace("\u00a0", " ").replace("¶", "").replace("\u200b", "").replace("\r", "")
        block = re.sub(r"\n{3,}", "\n\n", raw.strip("\n").rstrip()) if self._pre else re.sub(r"\s+", " ", raw).strip(" |")
        self._parts = []
        if block.strip():
            self._blocks.append(self._mark + block)
            self._mark = ""


def _gap(before: str, block: str) -> str:
    """Items of one list and rows of one table stand in adjacent lines."""
    rows = " | " in before and " | " in block and "\n" not in before + block
    return "\n" if rows or (before.startswith("- ") and block.startswith("- ")) else "\n\n"


def _is_navigation(attrs: list[tuple[str, str | None]]) -> bool:
    values = dict(attrs)
    classes = set((values.get("class") or "").split())
    return bool(classes & _NAVIGATION) or values.get("role") == "navigation" or values.get("id") in _NAVIGATION
