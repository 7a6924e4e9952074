"""What launch rules need to know of a part's tensor cores."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part


def leaves_registers(part: Part) -> bool:
    """Whether the widest tiles leave a thread registers enough.

    9.0's matrix instructions read operands from shared memory. Elsewhere operands (8.x, 12.x) or, on their way out of tensor
    memory, accumulators (10.x) take so many registers that the widest tiles spill.
    """
    return part.capability == 90
