"""Triton source of `advance`: one program a row."""

import triton
import triton.language as tl

from ouro_build.artifacts.rows import RECORD, Row

_RECORD = tl.constexpr(RECORD)
_POSITION, _LOOP, _TOKEN = (tl.constexpr(int(c)) for c in (Row.POSITION, Row.LOOP, Row.TOKEN))


@triton.jit
def advance(rows, tokens, row_state):
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * _RECORD
    slot = tl.load(record)
    if slot >= 0:
        state = row_state + slot.to(tl.int64) * _RECORD
        tl.store(state + _TOKEN, tl.load(tokens + row))
        tl.store(state + _POSITION, tl.load(record + _POSITION) + 1)
        tl.store(state + _LOOP, 0)
