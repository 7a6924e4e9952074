"""Triton source of `exit_gate`: one program a row."""

import triton
import triton.language as tl

from ouro_build.artifacts.rows import RECORD, Row

_RECORD, _LOOP = tl.constexpr(RECORD), tl.constexpr(int(Row.LOOP))


@triton.jit
def exit_gate(
    rows,
    x,
    weight,
    bias,
    hidden,
    row_state,
    gate_logits,
    exit_probability,
    SIZE: tl.constexpr,
    LOOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * _RECORD
    slot = tl.load(record).to(tl.int64)
    if slot >= 0:
        loop = tl.load(record + _LOOP)
        at = tl.arange(0, BLOCK)
        inside = at < SIZE
        state = tl.load(x + row * SIZE + at, mask=inside, other=0.0)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        logit = tl.sum(state.to(tl.float32) * w, 0) + tl.load(bias).to(tl.float32)

        remaining = 1.0
        for earlier in range(loop):
            remaining *= 1.0 - tl.sigmoid(tl.load(gate_logits + slot * LOOPS + earlier))
        probability = tl.where(loop == LOOPS - 1, remaining, tl.sigmoid(logit) * remaining)

        tl.store(gate_logits + slot * LOOPS + loop, logit)
        tl.store(exit_probability + slot * LOOPS + loop, probability)
        tl.store(hidden + slot * SIZE + at, state, mask=inside)
        tl.store(row_state + slot * _RECORD + _LOOP, loop + 1)
