"""Triton source of `resolve`: one program a row."""

import triton
import triton.language as tl

from ouro_build.artifacts.rows import RECORD, Row

_RECORD = tl.constexpr(RECORD)
_SLOT, _LOOP = tl.constexpr(int(Row.SLOT)), tl.constexpr(int(Row.LOOP))


@triton.jit
def resolve(batch, row_state, rows, loop_limit):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(batch + row)
    column = tl.arange(0, _RECORD)
    record = tl.full([_RECORD], -1, tl.int32)
    if slot >= 0:
        state = row_state + slot.to(tl.int64) * _RECORD
        loop = tl.load(state + _LOOP)
        if (loop >= 0) & (loop < loop_limit):
            record = tl.where(column == _SLOT, slot, tl.load(state + column))
    tl.store(rows + row * _RECORD + column, record)
