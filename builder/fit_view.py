"""How an artifact fits this machine and every known GPU: as values for tools, and drawn for people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import RenderableType
from rich.text import Text

from ouro_build.artifacts.fit import Fit, Machine, TargetFit, fit, fit_known_parts
from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.parts import Part
from ouro_build.builder.budget import size
from ouro_build.builder.output import stack, table


class KnownPart(msgspec.Struct, frozen=True, kw_only=True):
    """A known GPU, and the target that would run on it: with `notes`, or none, for `reasons`."""

    part: str
    arch: str
    target: str | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


class FitView(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is what would run on `machine`, None if nothing fits; `targets` says how each fared, and why."""

    machine: Machine
    target: str | None
    targets: tuple[TargetFit, ...]
    known: tuple[KnownPart, ...]


def view(manifest: Manifest, machine: Machine, memory: int | None) -> FitView:
    """Judge every target against `machine`, where a worker may hold `memory` bytes, and against every known part."""
    here = fit(manifest, machine, memory)
    known = known_parts(fit_known_parts(manifest))
    return FitView(machine=machine, target=here.target, targets=here.targets, known=known)


def known_parts(fits: Sequence[tuple[Part, Fit]]) -> tuple[KnownPart, ...]:
    """What would run on each known part, or why nothing would."""
    return tuple(
        KnownPart(
            part=part.name,
            arch=part.arch,
            target=found.target,
            reasons=() if found.accepted else _reasons(part, found),
            notes=found.chosen.notes if found.accepted else (),
        )
        for part, found in fits
    )


def draw(shown: FitView) -> RenderableType:
    """The view for people."""
    here = [
        (t.target, "yes" if t.accepted else "no", "\n".join(map(str, t.refusals)), "\n".join(t.notes)) for t in shown.targets
    ]
    known = [(k.part, k.arch, k.target or "–", "\n".join(k.reasons), "\n".join(k.notes)) for k in shown.known]
    hints = dict.fromkeys(r.hint for t in shown.targets for r in t.refusals if r.hint)
    return stack(
        Text(f"this machine: {_described(shown.machine)}"),
        table("targets on this machine", ("target", "fits", "reasons against it", "notes"), here),
        *([] if shown.target else [Text("\n".join(hints))]),
        table("known GPUs, idle", ("GPU", "architecture", "runs target", "reasons against it", "notes"), known),
    )


def _reasons(part: Part, found: Fit) -> tuple[str, ...]:
    """What is missing."""
    refusals = [r for t in found.targets if all(r.what != "capability" for r in t.refusals) for r in t.refusals]
    return tuple(map(str, refusals)) or (f"nothing was built for {part.arch}",)


def _described(machine: Machine) -> str:
    if machine.reason:
        return f"no usable GPU ({machine.reason})"
    capability = ".".join(map(str, machine.capability))
    free = f"{size(machine.memory_free)} of {size(machine.memory_total)} free"
    return f"{machine.name}, {capability}, {machine.sm_count} SMs, {free}"
