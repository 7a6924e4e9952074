"""Triton source of `silu_mul`: a program makes one block of one row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def silu_mul(rows, gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows + row * 8) >= 0:
        TYPE: tl.constexpr = out.dtype.element_ty
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        gate = tl.load(gate_up + row * (2 * SIZE) + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * (2 * SIZE) + SIZE + at, mask=inside, other=0.0).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32)
        tl.store(out + row * SIZE + at, (activated * up).to(TYPE), mask=inside)
