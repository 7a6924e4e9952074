"""Triton source of `embedding`: a program copies one block of one row's embedding."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.packed.source import column_offset, row_offset


@triton.jit
def embedding(rows, weight, hidden, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    record = rows + tl.program_id(0).to(tl.int64) * 8
    slot = tl.load(record)
    if slot >= 0:
        token = tl.load(record + 7)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < SIZE
        x = tl.load(weight + row_offset(token, SIZE) + column_offset(at), mask=inside)
        tl.store(hidden + slot.to(tl.int64) * SIZE + at, x, mask=inside)
