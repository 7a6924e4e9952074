"""GPUs a build can name: what each part offers, by architecture and by product."""

from __future__ import annotations

import msgspec

from ouro_build.artifacts.errors import UsageError

GIB = 1 << 30
KIB = 1 << 10


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU product. `shared` is shared memory in bytes that one block may use, `memory` device memory in bytes."""

    name: str
    arch: str
    sm_count: int
    memory: int
    shared: int

    @property
    def capability(self) -> int:
        """Compute capability as Triton writes it: 90 for 9.0."""
        return int(self.arch.removeprefix("sm_"))


# Shared memory a block may use, in bytes, by architecture (CUDA C++ programming guide, "Technical specifications per
# compute capability": 163, 99 and 227 KiB).
_SHARED = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_103": 227 * KIB,
    "sm_120": 99 * KIB,
    "sm_121": 99 * KIB,
}
ARCHITECTURES: tuple[str, ...] = tuple(_SHARED)


def _part(name: str, arch: str, sm_count: int, gib: int) -> Part:
    return Part(name, arch, sm_count, gib * GIB, _SHARED[arch])


# The first part of an architecture is what `sm_X` alone stands for.
PARTS: tuple[Part, ...] = (
    _part("a100-80gb", "sm_80", 108, 80),
    _part("a100-40gb", "sm_80", 108, 40),
    _part("a40", "sm_86", 84, 48),
    _part("a10", "sm_86", 72, 24),
    _part("rtx-3090", "sm_86", 82, 24),
    _part("l40s", "sm_89", 142, 48),
    _part("l4", "sm_89", 58, 24),
    _part("rtx-4090", "sm_89", 128, 24),
    _part("h200", "sm_90", 132, 140),
    _part("h100", "sm_90", 132, 80),
    _part("h100-pcie", "sm_90", 114, 80),
    _part("b200", "sm_100", 148, 180),
    _part("b300", "sm_103", 148, 268),
    _part("rtx-5090", "sm_120", 170, 32),
    _part("rtx-pro-6000", "sm_120", 188, 96),
    _part("dgx-spark", "sm_121", 48, 119),
)


def find_part(name: str) -> Part:
    """The part called `name`, or the default part of an architecture `sm_X`. Raises UsageError."""
    for part in PARTS:
        if name.lower() in (part.name, part.arch):
            return part
    known = ", ".join((*ARCHITECTURES, *(p.name for p in PARTS)))
    raise UsageError(f"unknown GPU {name!r}", where="--gpu", hint=f"Known: {known}")
