"""Triton source of `exit_gate`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


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
    PROGRAMMATIC: tl.constexpr,
):
    release(PROGRAMMATIC)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias).to(tl.float32)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * 8
    slot = tl.load(record).to(tl.int64)
    if slot >= 0:
        loop = tl.load(record + 2)
        state = tl.load(x + row * SIZE + at, mask=inside, other=0.0)
        logit = tl.sum(state.to(tl.float32) * w, 0) + b

        remaining = 1.0
        for earlier in tl.static_range(LOOPS - 1):
            if earlier < loop:
                remaining *= 1.0 - tl.sigmoid(tl.load(gate_logits + slot * LOOPS + earlier))
        probability = tl.where(loop == LOOPS - 1, remaining, tl.sigmoid(logit) * remaining)

        tl.store(gate_logits + slot * LOOPS + loop, logit)
        tl.store(exit_probability + slot * LOOPS + loop, probability)
        tl.store(hidden + slot * SIZE + at, state, mask=inside)
        tl.store(row_state + slot * 8 + 2, loop + 1)  # the state's loop
