"""What a warm-up saw, drawn for people."""

from __future__ import annotations

from rich.console import RenderableType

from ouro_build.artifacts.records import ObservedKey, ObservedRecord
from ouro_build.builder.output import table

_COLUMNS = ("program", "bucket", "patterns", "graph = launch", "error / tolerance", "graph µs", "launch µs")


def draw(observed: ObservedRecord) -> RenderableType:
    """One line a graph key."""
    title = f"{observed.target} on {observed.device.name}: what was seen of {observed.identity}"
    return table(title, _COLUMNS, (_row(key) for key in observed.keys))


def _row(key: ObservedKey) -> tuple[object, ...]:
    name = "/".join(filter(None, (key.program, key.mode, key.variant)))
    equal = {True: "yes", False: "NO", None: "no graph"}[key.bit_equal]
    numbers = ("–" if n is None else f"{n:.3g}" for n in (key.error, key.graph_us, key.launch_us))
    return (name, key.bucket, key.patterns, equal, *numbers)
