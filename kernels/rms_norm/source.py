"""Triton source of `rms_norm`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def rms_norm(rows, hidden, weight, residual, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    w = tl.load(weight + at, mask=inside, other=0.0)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row * 8)
    if slot >= 0:
        state = tl.load(hidden + slot.to(tl.int64) * SIZE + at, mask=inside, other=0.0)
        tl.store(residual + row * SIZE + at, state, mask=inside)
        x = state.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
        y = (x * scale).to(w.dtype).to(tl.float32) * w.to(tl.float32)
        tl.store(out + row * SIZE + at, y.to(w.dtype), mask=inside)
