"""Triton source of `advance`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def advance(rows, tokens, row_state, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * 8
    slot = tl.load(record)
    if slot >= 0:
        state = row_state + slot.to(tl.int64) * 8
        tl.store(state + 7, tl.load(tokens + row))  # token
        tl.store(state + 1, tl.load(record + 1) + 1)  # position
        tl.store(state + 2, 0)  # loop
