"""Graph keys in reports: their names, their order, and a chart of one number for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ouro_build.artifacts.records import GraphSize, KeyCount, ObservedKey
from ouro_build.builder.inspect import GraphView
from ouro_build.builder.report.charts import heat
from ouro_build.builder.report.page import Chart


class Key(NamedTuple):
    """What a graph is for. In sorted order the decode loops come first: they are what coverage is about."""

    other: bool
    program: str
    mode: str
    variant: str
    bucket: int

    @property
    def graph(self) -> str:
        """Program and variant."""
        return f"{self.program}/{self.variant}" if self.variant else self.program

    @property
    def line(self) -> str:
        """All but the bucket."""
        return "/".join(filter(None, (self.program, self.mode, self.variant)))


def key_of(k: GraphView | GraphSize | KeyCount | ObservedKey) -> Key:
    """The key that `k` is about."""
    return Key(k.program != "recurrent", k.program, k.mode, k.variant, k.bucket)


def by_bucket(title: str, values: Mapping[Key, float], wrong: Collection[Key] = ()) -> Chart:
    """A grid of `values`: a line for each program and mode, a column for each bucket. Those in `wrong` stand out."""
    keys = sorted(values)
    lines = {name: at for at, name in enumerate(dict.fromkeys(key.line for key in keys))}
    buckets = {bucket: at for at, bucket in enumerate(sorted({key.bucket for key in keys}))}
    places = {key: (lines[key.line], buckets[key.bucket]) for key in keys}
    cells = {places[key]: float(values[key]) for key in keys}
    return heat(title, [*lines], [str(b) for b in buckets], cells, wrong={places[key] for key in wrong if key in places})
