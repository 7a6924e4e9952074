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
    rows, update, update_weight, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    release(PROGRAMMATIC)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    u_weight = tl.load(update_weight + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row * 8, cache_modifier=".cg")
    wait(PROGRAMMATIC)
    # An inactive row's residual and update are read too, whatever they hold: no load waits for the row's record.
    TYPE: tl.constexpr = residual.dtype.element_ty
    state = residual + row * SIZE + at
    u = tl.load(update + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(state, mask=inside, other=0.0).to(tl.float32)
    h = (h + _normalise(u, u_weight, eps, SIZE, TYPE)).to(TYPE)
    y = _normalise(h.to(tl.float32), w, eps, SIZE, TYPE)
    if slot >= 0:
        tl.store(state, h, mask=inside)
        tl.store(out + row * SIZE + at, y.to(TYPE), mask=inside)
