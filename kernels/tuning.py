"""How launch rules come to their configurations: by tables, a part's own first, then the one shipped for its architecture or
the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.tuning import (
    Entry,
    Fragments,
    Queries,
    Residency,
    Splits,
    Tile,
    TuningRecord,
    TuningTable,
    decode_table,
)
from ouro_build.kernels.sites import Site
from ouro_build.kernels.spec import next_power_of_2

SHIPPED = Path(__file__).parent / "tables"
_LEAST_CLASS = 8  # as many rows and fewer cost much the same

Residencies = Mapping[tuple[str, str], Residency]
"""What launches ask for, by kernel and kind."""
NO_RESIDENCY: Residencies = {}
AnyParameters = TypeVar("AnyParameters", Fragments, Tile, Splits, Queries)


class Tuning(NamedTuple):
    """Tables in the order in which they are asked."""

    tables: tuple[TuningTable, ...]

    def find(self, site: Site) -> Entry | None:
        """The entry for `site` of the first table that has one; one for other rows yields to a later table's for the very rows.

        Of a table's entries those for the very sizes come before those for the kind; of each, one for the very rows first, then
        one for about as many (up to 8, or up to the same power of two; the fewest that are enough, else the most), then one for
        any rows.
        """
        found = [entry for entry in (_best(table, site) for table in self.tables) if entry is not None]
        if not found or found[0].rows in (site.rows, 0):
            return found[0] if found else None
        return next((entry for entry in found if entry.rows == site.rows), found[0])

    def parameters(self, site: Site, form: type[AnyParameters]) -> AnyParameters | None:
        """The configuration for `site`, None if no table has one."""
        entry = self.find(site)
        return entry.parameters if entry is not None and isinstance(entry.parameters, form) else None

    def residency(self, arch: str, bits: int, rows: int, sites: Iterable[Site]) -> Residencies:
        """What is asked for launches at `sites` and beside them: by the first table of `arch` itself that has a residency for
        just `rows` rows of a model of `bits` bits, or an entry for just these that a site has. A residency was found with
        certain entries, so where there are others and none was found with them, there is none."""
        used = {self.find(site) for site in sites}
        for table in self.tables:
            if table.arch != arch:
                continue
            found = {(r.kernel, r.kind): r for r in table.residency if (r.bits, r.rows) == (bits, rows)}
            if found or any(entry in used for entry in table.entries if entry.rows == rows):
                return found
        return NO_RESIDENCY

    def records(self, part: Part) -> tuple[TuningRecord, ...]:
        """What a manifest says of them."""
        return tuple(
            TuningRecord(
                name=t.name, arch=t.arch, digest=t.digest, match="exact" if t.arch == part.arch else "nearest"
            )
            for t in self.tables
        )  # fmt: skip


class TunedPart(Part, frozen=True):
    """A part with tables of its own: what launch rules choose by. Nothing stores it; manifests hold the plain part."""

    tuning: Tuning


def tuned(part: Part, tables: tuple[TuningTable, ...]) -> TunedPart:
    """`part` with `tables` asked before the shipped one."""
    return TunedPart(part.name, part.arch, part.sm_count, part.memory, part.shared, Tuning((*tables, shipped(part))))


def tuning_of(part: Part) -> Tuning:
    """The tables for `part`: its own if it has any, and the shipped one."""
    return part.tuning if isinstance(part, TunedPart) else Tuning((shipped(part),))


def shipped(part: Part) -> TuningTable:
    """The shipped table of the part's architecture, or of the one nearest to it by number."""
    tables = _shipped_tables()
    return min(tables, key=lambda t: (abs(_number(t.arch) - part.capability), t.arch))


@cache
def _shipped_tables() -> tuple[TuningTable, ...]:
    return tuple(decode_table(path.read_bytes(), str(path)) for path in sorted(SHIPPED.glob("*.json")))


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def _best(table: TuningTable, site: Site) -> Entry | None:
    mine = [e for e in table.entries if (e.kernel, e.bits) == (site.kernel, site.bits)]
    fitting = [(rank, e) for e in mine if (rank := _rank(e, site)) is not None]
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def _rank(entry: Entry, site: Site) -> tuple[int, int, int] | None:
    """How well `entry` suits `site`, the least best; None if not at all."""
    if entry.rows and _row_class(entry.rows) != _row_class(site.rows):
        return None
    if entry.sizes != site.sizes if entry.sizes else entry.kind != site.kind:
        return None
    nearness = (0 if entry.rows >= site.rows else 1, abs(entry.rows - site.rows)) if entry.rows else (2, 0)
    return (0 if entry.sizes else 1, *nearness)


def _row_class(rows: int) -> int:
    return max(_LEAST_CLASS, next_power_of_2(rows))
