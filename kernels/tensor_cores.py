"""What launch rules need to know of a part's tensor cores."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part

_READ_SHARED = (90, 100, 103)


def reads_shared_memory(part: Part) -> bool:
    """Whether matrix instructions take operands from shared memory (9.0, 10.x); elsewhere they pass through registers,
    which then bound the tile."""
    return part.capability in _READ_SHARED
