"""Triton source of `linear_silu`: `linear_few` over pairs of gate and up rows, with the gated product at its end."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.linear_few.source import early, fragment_rows, load_x, multiply, row_places, weight_places


@triton.jit
def linear_silu(
    rows, x, weight, out, ROWS: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr, K_WARPS: tl.constexpr,
    TILES: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    EIGHTS: tl.constexpr = BLOCK // 8
    STEPS: tl.constexpr = (K + K_WARPS * BLOCK_K - 1) // (K_WARPS * BLOCK_K)
    TYPE: tl.constexpr = out.dtype.element_ty
    eight = tl.arange(0, 2 * EIGHTS)
    pairs = (eight % EIGHTS * 8)[:, None] + tl.arange(0, 8)[None, :]
    half = (eight // EIGHTS * SIZE)[:, None]
    # Tiles and rows past the end repeat the last: the loads need no mask, the store has one.
    tile = tl.program_id(0)
    at = weight_places(weight, tl.minimum(tile * BLOCK + pairs, SIZE - 1) + half, K, BLOCK_K, K_WARPS)
    ahead = early(at, K, BLOCK_K, AHEAD, K_WARPS)
    wait(PROGRAMMATIC)
    each = tl.minimum(fragment_rows(ROW_TILE), ROWS - 1)
    x_at = row_places(x, each, K, BLOCK_K, K_WARPS)
    xs = load_x(x_at, each, K, BLOCK_K, K_WARPS, X_AHEAD, False)
    row = tl.arange(0, ROW_TILE)
    for i in tl.static_range(TILES):
        after = tile + tl.num_programs(0)
        next_at = weight_places(weight, tl.minimum(after * BLOCK + pairs, SIZE - 1) + half, K, BLOCK_K, K_WARPS)
        parts, ahead = multiply(
            ahead, at, next_at, xs, x_at, each, K, 2 * BLOCK, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, False,
            i == TILES - 1,
        )  # fmt: skip
        gate, up = tl.split(tl.sum(parts, 0).reshape(2, BLOCK, ROW_TILE).permute(1, 2, 0))
        gate = gate.to(TYPE).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32)
        y = activated * up.to(TYPE).to(tl.float32)
        n = tile * BLOCK + tl.arange(0, BLOCK)
        to = out + row.to(tl.int64)[None, :] * SIZE + n[:, None]
        tl.store(to, y.to(TYPE), mask=(row < ROWS)[None, :] & (n < SIZE)[:, None])
        if i < TILES - 1:
            if X_AHEAD < STEPS:
                xs = load_x(x_at, each, K, BLOCK_K, K_WARPS, X_AHEAD, False)
            tile = after
            at = next_at
