"""Sections on an artifact: what it is, where it fits, its memory, graphs and images."""

from __future__ import annotations

from collections.abc import Sequence

from ouro_build.artifacts.parts import KIB, Part, find_part
from ouro_build.artifacts.records import ObservedKey, ObservedRecord
from ouro_build.builder.budget import NODE_BYTES, size
from ouro_build.builder.fit_view import KnownPart
from ouro_build.builder.inspect import ArtifactView, GraphView, ImageView, TargetView, overview, percent_carved
from ouro_build.builder.report.charts import Bar, Point, Segment, bars, scatter
from ouro_build.builder.report.keys import Key, by_bucket, key_of
from ouro_build.builder.report.numbers import count, percent
from ouro_build.builder.report.page import Chart, Figure, Section, Table

_SMALL = 0.02
"""Pools below this share of a GPU are drawn once more, enlarged."""


def about(shown: ArtifactView) -> Section:
    """What the artifact is."""
    facts = tuple((name, _joined(value)) for name, value in overview(shown))
    return Section("artifact", "The artifact", facts)


def fit(known: Sequence[KnownPart]) -> Section:
    """Which known GPUs would run it."""
    columns = ("GPU", "architecture", "fits", "runs target", "reasons against it", "notes")
    rows = tuple(
        (k.part, k.arch, "yes" if k.target else "no", k.target or "–", "; ".join(k.reasons), "; ".join(k.notes)) for k in known
    )
    yes = sum(k.target is not None for k in known)
    table = Table("Known GPUs, each of them idle", columns, rows)
    return Section("fit", "Where it fits", (("fits", f"{yes} of {len(known)} known GPUs"),), (Figure(table),))


def memory(shown: ArtifactView) -> Section:
    """Device memory of every target, to scale."""
    return Section("memory", "Memory", figures=tuple(f for t in shown.targets for f in _memory(t)))


def graphs(shown: ArtifactView, observed: Sequence[ObservedRecord]) -> Section:
    """Every graph: launches, bytes, and what was seen of it on a device."""
    figures: list[Figure] = []
    facts = []
    for target in shown.targets:
        seen = next((o for o in observed if o.target == target.part), None)
        by_key = {} if seen is None else {key_of(k): k for k in seen.keys}
        figures += _graphs(target, by_key)
        facts.append((target.part, _observed_on(target, seen, by_key)))
    return Section("graphs", "Graphs", tuple(facts), tuple(figures))


def images(shown: ArtifactView) -> Section:
    """Every compiled kernel and what it takes of a multiprocessor."""
    return Section("images", "Images", figures=tuple(_images(t) for t in shown.targets))


def _memory(t: TargetView) -> list[Figure]:
    part = find_part(t.part)
    pools = [("reserve", t.reserve, "context, images, graphs"), *((p.pool, p.bytes, f"{p.buffers} buffers") for p in t.pools)]
    held = sum(size_ for _, size_, _ in pools)
    parts = [(name, size_, what) for name, size_, what in pools if size_]
    whole = [
        *parts,
        ("budget left", max(t.budget - held, 0), "planned for, and not needed"),
        ("outside the budget", max(part.memory - max(t.budget, held), 0), "left to others"),
    ]
    name = f"{t.part} ({t.arch})"
    kv = f"{t.kv_blocks:,} blocks of {size(t.kv_block_bytes)}"
    rows = tuple(
        (pool, size(bytes_), count(bytes_), percent(bytes_ / part.memory), kv if pool == "kv" else what)
        for pool, bytes_, what in whole
        if bytes_ or pool not in ("budget left", "outside the budget")
    )
    columns = ("pool", "size", "bytes", f"of {size(part.memory)}", "")
    table = Table(f"Device memory on {name}: {size(held)} of a budget of {size(t.budget)}", columns, rows, frozenset({1, 2, 3}))
    small = [p for p in parts if p[1] < _SMALL * part.memory]
    return [Figure(table, _memory_chart(name, part, whole, small))]


def _memory_chart(name: str, part: Part, whole: list[tuple[str, int, str]], small: list[tuple[str, int, str]]) -> Chart:
    segments = tuple(Segment(b, _style(pool), f"{pool}: {size(b)}") for pool, b, _ in whole)
    rows = [Bar("all of it", size(part.memory), segments)]
    if small:
        total = sum(b for _, b, _ in small)
        enlarge = part.memory / total
        enlarged = tuple(Segment(b * enlarge, _style(pool), f"{pool}: {size(b)}") for pool, b, _ in small)
        rows.append(Bar(f"pools below {percent(_SMALL)}, enlarged", size(total), enlarged))
    legend = tuple((_style(pool), f"{pool} {size(b)}") for pool, b, _ in whole if b)
    title = f"Memory map of {name}, to scale"
    return bars(title, rows, scale=part.memory, legend=legend, height=30)


def _style(pool: str) -> str:
    return "pool-" + pool.replace(" ", "-")


def _graphs(t: TargetView, seen: dict[Key, ObservedKey]) -> list[Figure]:
    columns = ("graph", "mode", "bucket", "launches", "device bytes", "verified", "error / tolerance", "graph µs", "launch µs")
    ordered = sorted(t.graphs, key=key_of)
    rows = tuple(_graph_row(g, seen.get(key_of(g))) for g in ordered)
    wrong = {key for key, k in seen.items() if _wrong(k)}
    bad = frozenset(i for i, g in enumerate(ordered) if key_of(g) in wrong)
    table = Table(f"Graphs for {t.part}", columns, rows, frozenset({2, 3, 4, 6, 7, 8}), bad)
    chart = by_bucket(f"Launches a graph, {t.part}", {key_of(g): g.nodes for g in ordered}, wrong)
    note = f"Device bytes are those that the plan reserves, {size(NODE_BYTES)} a kernel node."
    figures = [Figure(table, chart, note)]
    times = {key: k.graph_us for key, k in sorted(seen.items()) if k.graph_us is not None}
    if times:
        chart = by_bucket(f"Microseconds a replay, as observed on {t.part}", times, wrong)
        names = ("graph", "mode", "bucket", "µs")
        timed = tuple((key.graph, key.mode, str(key.bucket), f"{us:,.1f}") for key, us in times.items())
        figures.append(Figure(Table(f"Times of a replay on {t.part}", names, timed, frozenset({2, 3})), chart))
    return figures


def _graph_row(g: GraphView, seen: ObservedKey | None) -> tuple[str, ...]:
    numbers = ("–",) * 3 if seen is None else tuple(map(_number, (seen.error, seen.graph_us, seen.launch_us)))
    return (key_of(g).graph, g.mode, str(g.bucket), count(g.nodes), count(g.nodes * NODE_BYTES), _verified(seen), *numbers)


def _verified(seen: ObservedKey | None) -> str:
    if seen is None:
        return "not run"
    if _wrong(seen):
        return "NO"
    return "yes" if seen.bit_equal else "no graph"


def _wrong(seen: ObservedKey | None) -> bool:
    return seen is not None and (seen.bit_equal is False or (seen.error or 0.0) > 1)


def _observed_on(target: TargetView, seen: ObservedRecord | None, by_key: dict[Key, ObservedKey]) -> str:
    nodes = sum(g.nodes for g in target.graphs)
    built = f"{len(target.graphs)} graphs of {nodes:,} kernel nodes"
    if seen is None:
        return f"{built}; not verified on a device: `ouro-artifact warm` does that"
    good = sum(_verified(by_key.get(key_of(g))) == "yes" for g in target.graphs)
    return f"{built}; {good} verified on {seen.device.name}"


def _images(t: TargetView) -> Figure:
    columns = ("kernel", "registers", "spills", "shared", "carve-out", "warps", "file bytes", "constants")
    rows = tuple(
        (i.kernel, str(i.registers), str(i.spills), count(i.shared), percent_carved(i.carveout), str(i.num_warps),
         count(i.bytes), _constants(i))
        for i in t.images
    )  # fmt: skip
    bad = frozenset(n for n, i in enumerate(t.images) if i.spills)
    limit = find_part(t.part).shared
    caption = f"Images for {t.part}: registers and spilled bytes a thread, shared bytes a block (at most {count(limit)})"
    points = [
        Point(i.registers, i.shared / KIB, "spill" if i.spills else "point", f"{i.kernel} {_constants(i)}") for i in t.images
    ]
    title = f"Images for {t.part}: registers a thread, and shared memory a block up to the limit"
    chart = scatter(title, points, (255, "registers"), (limit / KIB, "shared KiB"))
    legend = (("point", "no spills"), ("spill", "spills registers")) if bad else ()
    return Figure(Table(caption, columns, rows, frozenset(range(1, 7)), bad), chart._replace(legend=legend))


def _constants(image: ImageView) -> str:
    return " ".join(f"{name}={value}" for name, value in image.constants.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _joined(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
