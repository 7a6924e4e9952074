"""Numbers as reports show them."""

from __future__ import annotations

from ouro_build.builder.budget import size

HIGHEST = 1e15
"""Larger numbers than this, which nothing that runs can count, are drawn as this: a chart of them stays a chart."""


def drawable(value: float) -> float:
    """`value` within what charts can be drawn of: 0 … HIGHEST."""
    return min(max(0.0, float(value)), HIGHEST)  # in this order: -0.0 becomes 0.0


def count(value: int) -> str:
    """1,234"""
    return f"{value:,}"


def compact(value: float) -> str:
    """A number in four characters or so: 950, 1.2k, 34M."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            scaled = value / unit
            return (f"{scaled:.1f}" if scaled < 9.95 else f"{scaled:.0f}" if scaled < 1e4 else "∞") + name
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def percent(share: float) -> str:
    """12.3 %"""
    return f"{share:.1%}".replace("%", " %")


def seconds(value: float) -> str:
    """A time: 1.234 s, 12.3 ms, 45 µs."""
    if abs(value) >= 1:
        return f"{value:.3f} s" if abs(value) < 1e6 else f"{value:.3g} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 or value == 0 else f"{value * 1e6:.0f} µs"


def rate(moved: int, took: float) -> str:
    """Bytes a second, empty where nothing moved."""
    return f"{size(round(min(moved / took, HIGHEST)))}/s" if moved > 0 and took > 0 else ""


def moved(count_: int) -> str:
    """Bytes, empty for none."""
    return size(count_) if count_ else ""


def change(before: float, after: float) -> str:
    """What became of a number: +12.0 %, -3.1 %, or new where there was none."""
    if before == after:
        return "="
    if before == 0:
        return "new"
    share = after / before - 1
    return f"{share:+.1%}".replace("%", " %") if abs(share) < 1e4 else f"× {share + 1:.3g}"
