"""Two records of one kind side by side: what a worker did, and what an older one had done."""

from __future__ import annotations

from collections import Counter, defaultdict

from ouro_build.artifacts.records import CoverageRecord, StartupRecord
from ouro_build.builder.predict import recorded
from ouro_build.builder.report.charts import Bar, Segment, bars
from ouro_build.builder.report.numbers import change, count, percent, seconds
from ouro_build.builder.report.page import Figure, Section, Table, numeric_from

_LEGEND = (("before", "before"), ("after", "now"))


def startup_difference(before: StartupRecord, now: StartupRecord) -> Section:
    """Seconds of every phase, before and now."""
    old, new = _seconds(before), _seconds(now)
    names = list(dict.fromkeys([*new, *old]))
    pairs = [("all, to the first token", "", before.wall_s, now.wall_s)]
    pairs += [(name, parent, old.get((name, parent), 0.0), new.get((name, parent), 0.0)) for name, parent in names]
    columns = ("phase", "inside", "before", "now", "difference", "change")
    rows = tuple((n, p, seconds(a), seconds(b), _signed(b - a), change(a, b)) for n, p, a, b in pairs)
    shown = [bar for n, _, a, b in pairs for bar in _pair(n, a, b, f"{seconds(a)} → {seconds(b)}")]
    chart = bars("Seconds by phase, before and now", shown, legend=_LEGEND)
    figure = Figure(Table("Start-up, before and now", columns, rows, numeric_from(2, columns)), chart)
    return Section("startup-difference", "Start-up against the older record", figures=(figure,))


def coverage_difference(before: CoverageRecord, now: CoverageRecord) -> Section:
    """Shares, replays and fallbacks, before and now."""
    figures = (_shares(before, now), _replays(before, now), _fallbacks(before, now))
    return Section("coverage-difference", "Coverage against the older record", figures=figures)


def _shares(before: CoverageRecord, now: CoverageRecord) -> Figure:
    old, new = recorded(before), recorded(now)
    shares = (
        ("coverage share", before.share, now.share),
        ("padded share", before.padded_share, now.padded_share),
        ("split steps", old.split_share, new.split_share),
    )
    rows = [(name, percent(a), percent(b), f"{100 * (b - a):+.1f} points") for name, a, b in shares]
    a, b = before.replays_a_step, now.replays_a_step
    rows.append(("replays a step", f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"))
    rows.append(("decode steps", count(old.steps), count(new.steps), f"{new.steps - old.steps:+,}"))
    columns = ("of decode loops", "before", "now", "difference")
    shown = [bar for name, a, b in shares for bar in _pair(name, a, b, f"{percent(a)} → {percent(b)}")]
    chart = bars("Shares, before and now", shown, scale=1.0, ticks={0: "0 %", 0.5: "50 %", 1: "100 %"}, legend=_LEGEND)
    return Figure(Table("Shares, before and now", columns, tuple(rows), numeric_from(1, columns)), chart)


def _replays(before: CoverageRecord, now: CoverageRecord) -> Figure:
    old, new = ({(k.program, k.mode, k.variant, k.bucket): k for k in r.keys} for r in (before, now))
    rows = []
    for key in sorted({*old, *new}):
        program, mode, variant, bucket = key
        a, b = old.get(key), new.get(key)
        counts = (a.replays if a else 0, b.replays if b else 0, a.padded_rows if a else 0, b.padded_rows if b else 0)
        name = f"{program}/{variant}" if variant else program
        rows.append((name, mode, str(bucket), *map(count, counts)))
    columns = ("graph", "mode", "bucket", "replays before", "now", "padded rows before", "now")
    return Figure(Table("Replays by graph, before and now", columns, tuple(rows), numeric_from(2, columns)))


def _fallbacks(before: CoverageRecord, now: CoverageRecord) -> Figure:
    old, new = _rows_fallen_back(before), _rows_fallen_back(now)
    rows = tuple((*key, count(old[key]), count(new[key]), f"{new[key] - old[key]:+,}") for key in sorted({*old, *new}))
    columns = ("reason", "program", "mode", "path", "rows before", "now", "difference")
    return Figure(Table("Rows that fell back, before and now", columns, rows, numeric_from(4, columns)))


def _rows_fallen_back(record: CoverageRecord) -> Counter[tuple[str, str, str, str]]:
    found: Counter[tuple[str, str, str, str]] = Counter()
    for f in record.fallbacks:
        found[f.reason.value, f.program, f.mode, f.path] += f.rows * f.count
    return found


def _seconds(record: StartupRecord) -> dict[tuple[str, str], float]:
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for phase in record.phases:
        found[phase.name, phase.parent] += phase.seconds
    return found


def _pair(name: str, before: float, now: float, note: str) -> tuple[Bar, Bar]:
    """Two bars, the older one above."""
    return (
        Bar(name, note, (Segment(before, "before", f"{name}, before"),)),
        Bar("", "", (Segment(now, "after", f"{name}, now"),)),
    )


def _signed(value: float) -> str:
    return ("+" if value > 0 else "-" if value < 0 else "") + seconds(abs(value))
