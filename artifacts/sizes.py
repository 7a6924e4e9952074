"""Sizes in bytes as people write them."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*")  # Python refuses numbers of too many digits


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A click parameter in bytes: `24GiB`, `512 MiB`, `1.5TiB` or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value))
        unit = None if found is None else _UNITS.get(found[2].upper())
        if found is None or unit is None or (unit == 1 and "." in found[1]):
            self.fail(f"{value!r} is not a size. Write it like 24GiB; units are KiB, MiB, GiB, TiB.", param, ctx)
        return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


SIZE = Size()
