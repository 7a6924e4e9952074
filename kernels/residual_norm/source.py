"""Triton source of `residual_norm`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def _normalise(x, w, eps, SIZE: tl.constexpr, TYPE: tl.constexpr):
    """float32 in and out; the norm and its product with the weight are each rounded to TYPE."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    y = (x * scale).to(TYPE).to(tl.float32) * w
    return y.to(TYPE).to(tl.float32)


@triton.jit
def residual_norm(
    rows, update, update_weight, hidden, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    release(PROGRAMMATIC)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    u_weight = tl.load(update_weight + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row * 8)
    if slot >= 0:
        TYPE: tl.constexpr = hidden.dtype.element_ty
        state = hidden + slot.to(tl.int64) * SIZE + at
        u = tl.load(update + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(state, mask=inside, other=0.0).to(tl.float32)
        h = (h + _normalise(u, u_weight, eps, SIZE, TYPE)).to(TYPE)
        tl.store(state, h, mask=inside)
        y = _normalise(h.to(tl.float32), w, eps, SIZE, TYPE)
        tl.store(out + row * SIZE + at, y.to(TYPE), mask=inside)
