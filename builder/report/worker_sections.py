"""Sections on a live worker: where its start-up went, what ran by graphs, what did not, and what was padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ouro_build.artifacts.records import CoverageRecord, FallbackCount, KeyCount, PhaseRecord, StartupRecord
from ouro_build.builder.predict import recorded
from ouro_build.builder.report.charts import Bar, Segment, bars, columns, ticks
from ouro_build.builder.report.keys import Key, by_bucket, key_of
from ouro_build.builder.report.numbers import count, drawable, moved, percent, rate, seconds
from ouro_build.builder.report.page import Chart, Figure, Section, Table, numeric_from

_DEEPEST = 6
_LEGEND = (("live", "live rows"), ("padded", "padded rows"))


def startup(record: StartupRecord | None) -> Section:
    """From the start of the process to the first token, phase by phase."""
    if record is None:
        note = "Not recorded. `ouro-worker run ART … --startup-out S.json` records it; then give --startup S.json."
        return Section("startup", "Start-up", note=note)
    facts = [("first token after", seconds(record.wall_s)), ("in named phases", f"{percent(record.accounted)} of it")]
    if record.node_us is not None:
        restored = f"{count(record.graphs)}, {count(record.nodes)} kernel nodes, {record.node_us:.3g} µs a node"
        facts.append(("graphs restored", restored))
    names = ("phase", "inside", "begins", "takes", "of all", "moves", "rate")
    rows = tuple(_phase_row(p, record.wall_s) for p in record.phases)
    table = Table("Start-up by phase", names, rows, numeric_from(2, names))
    return Section("startup", "Start-up", tuple(facts), (Figure(table, _waterfall(record)),))


def coverage(record: CoverageRecord | None) -> tuple[Section, ...]:
    """What ran by graphs, what fell back and why, and the rows that were padding."""
    if record is None:
        note = "Not recorded. `ouro-worker run ART … --coverage-out C.json` records it; then give --coverage C.json."
        return (Section("coverage", "Coverage", note=note),)
    return (_replays(record), _fallbacks(record.fallbacks), _padding(record))


def coverage_facts(record: CoverageRecord) -> tuple[tuple[str, str], ...]:
    """The shares, and the replays a step, which belong together."""
    outcome = recorded(record)
    return (
        ("coverage share", percent(record.share)),
        ("padded share", percent(record.padded_share)),
        ("replays a step", f"{record.replays_a_step:.2f}"),
        ("decode steps", f"{count(outcome.steps)}, {count(outcome.split_steps)} of them split"),
    )


def _phase_row(p: PhaseRecord, wall: float) -> tuple[str, ...]:
    share = percent(p.seconds / wall) if wall > 0 else ""
    inside = f"{p.parent}, beside it" if p.beside and p.parent else "beside" if p.beside else p.parent
    return (p.name, inside, seconds(p.start_s), seconds(p.seconds), share, moved(p.bytes), rate(p.bytes, p.seconds))


def _waterfall(record: StartupRecord) -> Chart:
    parents = {p.name: p.parent for p in record.phases}
    rows = []
    for p in record.phases:
        depth = _depth(p.name, parents)
        said = f"{p.name}: {seconds(p.seconds)} from {seconds(p.start_s)}"
        note = " · ".join(filter(None, (seconds(p.seconds), rate(p.bytes, p.seconds))))
        style = "beside" if p.beside else f"depth-{min(depth, 2)}"
        rows.append(Bar(p.name, note, (Segment(p.seconds, style, said),), p.start_s, depth))
    ends = (drawable(p.start_s) + drawable(p.seconds) for p in record.phases)
    full = max((drawable(record.wall_s), *ends))
    unit, factor = (" ms", 1e3) if full < 1 else (" s", 1.0)
    title = f"Start-up waterfall: {seconds(record.wall_s)} to the first token"
    legend = (("beside", "on another thread"),) if any(p.beside for p in record.phases) else ()
    return bars(title, rows, scale=full, ticks=ticks(full, unit, factor), legend=legend)


def _depth(name: str, parents: dict[str, str]) -> int:
    """How many phases `name` is inside of; a circle of parents ends somewhere."""
    depth = 0
    while (name := parents.get(name, "")) and depth < _DEEPEST:
        depth += 1
    return depth


def _replays(record: CoverageRecord) -> Section:
    counts = {key_of(k): k for k in record.keys}
    keys = sorted({*counts, *map(key_of, record.graphs)})
    names = ("graph", "mode", "bucket", "replays", "live rows", "padded rows", "padded")
    table = Table("Replays by graph", names, tuple(_key_row(key, counts.get(key)) for key in keys), numeric_from(2, names))
    replays = {key: float(counts[key].replays if key in counts else 0) for key in keys}
    chart = by_bucket("Replays by bucket and mode", replays) if keys else None
    figures = (Figure(table, chart, "" if keys else "No graph was declared or replayed."), _steps(record))
    return Section("coverage", "Coverage", coverage_facts(record), figures)


def _steps(record: CoverageRecord) -> Figure:
    total = sum(s.count for s in record.steps) or 1
    rows = tuple((s.mode, str(s.rows), str(s.loops), count(s.count), percent(s.count / total)) for s in record.steps)
    names = ("mode", "live rows", "loops", "steps", "of all")
    counts: Counter[int] = Counter()
    for s in record.steps:
        counts[s.rows] += s.count
    chart = columns("Decode steps by live rows", counts, record.buckets) if counts else None
    return Figure(Table("Decode steps by shape", names, rows, numeric_from(1, names)), chart)


def _fallbacks(found: Sequence[FallbackCount]) -> Section:
    if not found:
        return Section("fallbacks", "Fallbacks", note="None: every program ran by one graph.")
    ordered = sorted(found, key=lambda f: (-f.count * f.rows, f.reason.value, f.program, f.mode, f.rows, f.path))
    names = ("reason", "rows", "times", "rows in all", "program", "mode", "path")
    rows = tuple(
        (f.reason.value, count(f.rows), count(f.count), count(f.rows * f.count), f.program, f.mode, f.path) for f in ordered
    )
    shown = [
        Bar(
            f"{f.reason.value}: {f.program}, {f.rows} rows",
            f"{count(f.count)} × {f.path}",
            (Segment(f.rows * f.count, "fallback", f"{count(f.rows * f.count)} rows"),),
        )
        for f in ordered
    ]
    chart = bars("Rows that took another path than one graph, by reason and shape", shown)
    return Section("fallbacks", "Fallbacks", figures=(Figure(Table("Fallbacks", names, rows, frozenset({1, 2, 3})), chart),))


def _padding(record: CoverageRecord) -> Section:
    found = {key_of(k): k for k in record.keys if k.program in ("recurrent", "prefill")}
    if not found:
        return Section("padding", "Padded rows", note="No loop was replayed by a graph.")
    ordered, padding = sorted(found.items()), sum(k.padded_rows for k in found.values()) or 1
    names = ("loop", "bucket", "live rows", "padded rows", "padded", "of all padding")
    rows = tuple(
        (key.line, str(key.bucket), count(k.live_rows), count(k.padded_rows), _padded(k), percent(k.padded_rows / padding))
        for key, k in ordered
    )
    chart = bars("Live and padded rows of loops, by bucket", [_padding_bar(key, k) for key, k in ordered], legend=_LEGEND)
    figure = Figure(Table("Padding by bucket", names, rows, numeric_from(1, names)), chart)
    return Section("padding", "Padded rows", figures=(figure,))


def _padding_bar(key: Key, k: KeyCount) -> Bar:
    live = Segment(k.live_rows, "live", f"{count(k.live_rows)} live rows")
    padded = Segment(k.padded_rows, "padded", f"{count(k.padded_rows)} padded rows")
    return Bar(f"{key.line}, bucket {key.bucket}", f"{_padded(k)} padded", (live, padded))


def _key_row(key: Key, k: KeyCount | None) -> tuple[str, ...]:
    counts = ("0", "0", "0", "–") if k is None else (*map(count, (k.replays, k.live_rows, k.padded_rows)), _padded(k))
    return (key.graph, key.mode, str(key.bucket), *counts)


def _padded(k: KeyCount) -> str:
    rows = k.live_rows + k.padded_rows
    return percent(k.padded_rows / rows) if rows else "–"
