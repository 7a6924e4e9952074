"""Whether an artifact can run on a machine: a value with reasons, decided before anything is allocated."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ouro_build.artifacts.errors import FitError
from ouro_build.artifacts.manifest import Manifest, MemoryPlan, TargetRecord
from ouro_build.artifacts.parts import GIB, PARTS, Part
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.references import slots_part

EXACT_FROM = 9
"""From this major capability on, images are architecture-specific and run on that capability alone."""


CONTEXT_BYTES = 600 << 20
"""What a CUDA context is taken to hold on a device, as a part of every plan's reserve. Measured on an H200: 527 MiB."""


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one GPU of a machine offers. Memory is in bytes; `cuda` is the driver's CUDA version, None where not known.

    `context` is how much of the memory in use is this process's own CUDA context, 0 where none is open.

    `reason` says why there is no usable GPU, and is empty where there is one; the other fields then mean nothing.
    """

    name: str = ""
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 0
    memory_total: int = 0
    memory_free: int = 0
    context: int = 0
    cuda: tuple[int, int] | None = None
    reason: str = ""

    @property
    def available(self) -> int:
        """Bytes that a worker of this process may hold in all: what is free, and its context, which plans count too."""
        return self.memory_free + self.context

    @classmethod
    def absent(cls, reason: str) -> Machine:
        """A machine with no usable GPU, for this reason."""
        return cls(reason=reason)

    @classmethod
    def of_part(cls, part: Part) -> Machine:
        """A machine with an idle `part` and a driver that is not known."""
        memory = part.memory
        capability = divmod(part.capability, 10)
        return cls(name=part.name, capability=capability, sm_count=part.sm_count, memory_total=memory, memory_free=memory)


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One reason why a target cannot be used, and what to do about it."""

    what: Literal["device", "capability", "cuda", "memory"]
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"


class TargetFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One target against one machine: accepted if nothing refuses it. `kv_blocks` is what the worker's KV pool may hold."""

    target: str
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    kv_blocks: int

    @property
    def accepted(self) -> bool:
        """Whether the target can be used."""
        return not self.refusals


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The decision about an artifact: the chosen target, or None, and how every target fared."""

    target: str | None
    targets: tuple[TargetFit, ...]

    @property
    def accepted(self) -> bool:
        """Whether some target can be used."""
        return self.target is not None

    @property
    def chosen(self) -> TargetFit:
        """The chosen target's fit. Raises FitError with every reason of every target if there is none."""
        for candidate in self.targets:
            if candidate.target == self.target:
                return candidate
        raise self.error()

    @property
    def no_device(self) -> bool:
        """Whether nothing fits because there is no usable GPU at all."""
        return any(r.what == "device" for t in self.targets for r in t.refusals)

    def error(self) -> FitError:
        """Why nothing fits, as an error."""
        lines = [f"{t.target}: {refusal}" for t in self.targets for refusal in t.refusals]
        hints = dict.fromkeys(r.hint for t in self.targets for r in t.refusals if r.hint)
        return FitError("no target of this artifact fits this machine\n  " + "\n  ".join(lines), hint="\n".join(hints))


def fit(manifest: Manifest, machine: Machine, memory: int | None = None) -> Fit:
    """Decide which target of `manifest` runs on `machine`, where a worker may hold `memory` bytes.

    Without `memory` a worker holds what was planned, or what is free if that is less and still serves one request.
    """
    fits = {t.part.name: fit_target(manifest, t, machine, memory) for t in manifest.targets}
    usable = [t for t in manifest.targets if fits[t.part.name].accepted]
    best = min(usable, key=lambda t: _distance(t.part, machine), default=None)
    return Fit(target=best.part.name if best else None, targets=tuple(fits.values()))


def fit_target(manifest: Manifest, target: TargetRecord, machine: Machine, memory: int | None = None) -> TargetFit:
    """Judge one target of `manifest`, with every reason."""
    if machine.reason:
        refusal = Refusal(
            what="device",
            expected=f"a GPU of {_version(_capability(target.part))}",
            found=machine.reason,
            hint="Run on a machine with an NVIDIA GPU and driver, or with --executor reference.",
        )
        return TargetFit(target=target.part.name, refusals=(refusal,), notes=(), kv_blocks=target.memory.kv_blocks)
    blocks, memory_refusal, notes = _fit_memory(manifest, target.memory, machine, memory)
    refusals = (_fit_capability(target.part, machine), _fit_cuda(target, machine), memory_refusal)
    return TargetFit(
        target=target.part.name,
        refusals=tuple(r for r in refusals if r),
        notes=(*_notes(target, machine), *notes),
        kv_blocks=blocks,
    )


def fit_known_parts(manifest: Manifest) -> tuple[tuple[Part, Fit], ...]:
    """How the artifact would fare on an idle GPU of every known part."""
    return tuple((part, fit(manifest, Machine.of_part(part))) for part in PARTS)


def _fit_capability(part: Part, machine: Machine) -> Refusal | None:
    built, found = _capability(part), machine.capability
    if built[0] >= EXACT_FROM:
        good, expected = found == built, f"compute capability {_version(built)}"
    else:
        good = found[0] == built[0] and found[1] >= built[1]
        expected = f"compute capability {_version(built)} up to {built[0]}.9"
    if good:
        return None
    arch = f"sm_{found[0]}{found[1]}"
    hint = f"Build for this GPU: ouro-build … --gpu {arch}"
    return Refusal(what="capability", expected=expected, found=f"{_version(found)} ({machine.name})", hint=hint)


def _fit_cuda(target: TargetRecord, machine: Machine) -> Refusal | None:
    major = int(target.ptxas.split(".")[0])
    if machine.cuda is None or machine.cuda[0] >= major:
        return None
    return Refusal(
        what="cuda",
        expected=f"a driver for CUDA {major} or newer (images by ptxas {target.ptxas})",
        found=f"CUDA {_version(machine.cuda)}",
        hint="Update the NVIDIA driver, or build with a Triton whose ptxas is older.",
    )


def _fit_memory(
    manifest: Manifest, plan: MemoryPlan, machine: Machine, memory: int | None
) -> tuple[int, Refusal | None, tuple[str, ...]]:
    """KV blocks that fit, why they do not, and what is to be noted."""
    geometry = manifest.geometry
    fixed = plan.total - plan.pool_bytes(Pool.KV)
    allowed = min(plan.total, machine.available) if memory is None else memory
    most = max(plan.kv_blocks, geometry.max_requests * geometry.table_width)
    blocks = min(max(allowed - fixed, 0) // plan.kv_block_bytes, most)
    least = min(plan.kv_blocks, geometry.table_width)
    needed = fixed + least * plan.kv_block_bytes
    if blocks < least:
        hint = "Give the worker more with --memory, free the device's memory, or build with a smaller --max-context."
        found = f"{_gib(allowed)} ({_free(machine)})"
        parts = f"weights, buffers{slots_part(manifest.model, geometry)} and one request of {geometry.max_context} tokens"
        expected = f"{_gib(needed)} for {parts}"
        return blocks, Refusal(what="memory", expected=expected, found=found, hint=hint), ()
    if allowed > machine.available:
        hint = f"Pass --memory of {_gib(needed)} or more, and no more than is free."
        return blocks, Refusal(what="memory", expected=_gib(allowed), found=_free(machine), hint=hint), ()
    if blocks == plan.kv_blocks:
        return blocks, None, ()
    return blocks, None, (f"memory: {blocks} KV blocks instead of the planned {plan.kv_blocks} ({_free(machine)})",)


def _notes(target: TargetRecord, machine: Machine) -> tuple[str, ...]:
    notes = []
    if machine.sm_count != target.part.sm_count:
        notes.append(f"sm_count: built for {target.part.sm_count} SMs, {machine.sm_count} found: right, perhaps slower")
    if machine.cuda is None:
        notes.append(f"cuda: needs a driver for CUDA {target.ptxas.split('.')[0]} or newer")
    return tuple(notes)


def _distance(part: Part, machine: Machine) -> tuple[int, int, int]:
    """Sorts targets that all fit: the machine's own part first, then the newest images, then the nearest SM count."""
    words = set(part.name.split("-"))
    named = len(words) if words <= set(re.split(r"[^a-z0-9]+", machine.name.lower())) else 0
    return (-named, -part.capability, abs(part.sm_count - machine.sm_count))


def _capability(part: Part) -> tuple[int, int]:
    return divmod(part.capability, 10)


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _free(machine: Machine) -> str:
    own = f" beside a context of {_gib(machine.context)}" if machine.context else ""
    return f"{_gib(machine.memory_free)} free of {_gib(machine.memory_total)}{own}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
