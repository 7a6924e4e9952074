"""What a tuning found, drawn for people."""

from __future__ import annotations

from rich.console import RenderableType

from ouro_build.builder.output import stack, table
from ouro_build.builder.tune import TunedSite, TunedStep, TuneResult

_STEPS = ("step", "rows", "context", "µs before", "µs after", "share", "µs gained by carve-out", "by residency")
_SITES = ("step", "kernel", "sizes", "launches", "tried", "refused", "µs gained", "changed")


def draw(found: TuneResult) -> RenderableType:
    """One line a step, then one a kernel and shape."""
    title = f"{found.target} on {found.device}: steps of {found.identity}"
    return stack(
        table(title, _STEPS, map(_step, found.steps)),
        table("kernels in them", _SITES, (_site(step, site) for step in found.steps for site in step.sites)),
        table("table", ("path", "digest"), [(found.path, found.digest)]),
    )


def _step(step: TunedStep) -> tuple[object, ...]:
    share = f"{step.us / step.before_us:.3f}"
    gained = (f"{step.carveout_gained_us:.1f}", f"{step.residency_gained_us:.1f}")
    return (step.family, step.bucket, step.context, f"{step.before_us:.1f}", f"{step.us:.1f}", share, *gained)


def _site(step: TunedStep, site: TunedSite) -> tuple[object, ...]:
    changed = ", ".join(f"{name} {before} → {after}" for name, before, after in site.changed) or "–"
    sizes = "×".join(map(str, site.sizes))
    where = f"{step.family}, {step.bucket} rows"
    return (where, site.kernel, sizes, site.launches, site.tried, site.refused, f"{site.gained_us:.1f}", changed)
