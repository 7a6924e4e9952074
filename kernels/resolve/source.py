"""Triton source of `resolve`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def resolve(batch, row_state, rows, loop_limit, position_limit, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(batch + row)
    column = tl.arange(0, 8)
    record = tl.full([8], -1, tl.int32)
    if slot >= 0:
        state = row_state + slot.to(tl.int64) * 8
        position = tl.load(state + 1)
        loop = tl.load(state + 2)
        if (loop >= 0) & (loop < loop_limit) & (position >= 0) & (position < position_limit):
            record = tl.where(column == 0, slot, tl.load(state + column))
    tl.store(rows + row * 8 + column, record)
