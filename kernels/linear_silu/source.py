"""Triton source of `linear_silu`: `linear_few` over pairs of gate and up rows, with the gated product at its end."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.linear_few.source import early, fragment_rows, multiply


@triton.jit
def linear_silu(
    rows, x, weight, out, ROWS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr, K_WARPS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    EIGHTS: tl.constexpr = BLOCK // 8
    TYPE: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * BLOCK
    eight = tl.arange(0, 2 * EIGHTS)
    n = first + (eight % EIGHTS * 8)[:, None] + tl.arange(0, 8)[None, :]
    if SIZE % BLOCK != 0:
        # Rows past the end repeat the last: the loads need no mask, the store has one.
        n = tl.minimum(n, SIZE - 1)
    n += (eight // EIGHTS * SIZE)[:, None]
    ahead = early(weight, n, K, BLOCK_K, AHEAD, K_WARPS)
    wait(PROGRAMMATIC)
    each = tl.minimum(fragment_rows(ROW_TILE), ROWS - 1)  # rows past the last repeat it
    both = multiply(
        ahead, x, each, each >= 0, weight, n, K, 2 * BLOCK, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, False
    )  # fmt: skip
    row = tl.arange(0, ROW_TILE)
    gate, up = tl.split(both.reshape(2, BLOCK, ROW_TILE).permute(1, 2, 0))
    gate = gate.to(TYPE).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32)
    y = activated * up.to(TYPE).to(tl.float32)
    at = first + tl.arange(0, BLOCK)
    to = out + row.to(tl.int64)[None, :] * SIZE + at[:, None]
    tl.store(to, y.to(TYPE), mask=(row < ROWS)[None, :] & (at < SIZE)[:, None])
