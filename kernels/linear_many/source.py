"""Triton source of `linear_many`: one program an output tile, neighbours sharing operands in the cache."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.packed.source import column_offset, row_offset


@triton.jit
def linear_many(
    rows, x, weight, out, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    TILES_M: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # GROUP tiles of rows are walked together along N: their weights are read once into the cache.
    pid = tl.program_id(0)
    band = pid // (GROUP * TILES_N)
    height = tl.minimum(TILES_M - band * GROUP, GROUP)
    tile_m = band * GROUP + pid % (GROUP * TILES_N) % height
    tile_n = pid % (GROUP * TILES_N) // height

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(rows + row * 8, mask=row < ROWS, other=-1)
    live = slot >= 0
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        n = tl.minimum(n, N - 1)  # Columns past the end repeat the last: the loads need no mask, the store has one.
    k = tl.arange(0, BLOCK_K)
    # Rows past the last repeat it, and an inactive row's x is read, whatever it holds. A slot is read only if a row is in it.
    x_at = x + (slot if GATHER else tl.minimum(row, ROWS - 1)).to(tl.int64)[:, None] * K + k[None, :]
    w_at = weight + row_offset(n, K)[None, :] + column_offset(k)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(x_at + start, mask=live[:, None], other=0.0) if GATHER else tl.load(x_at + start)
            b = tl.load(w_at + start * 16)
        else:
            inside = (k + start < K)[None, :]
            a = tl.load(x_at + start, mask=live[:, None] & inside if GATHER else inside, other=0.0)
            # Blocks that begin before K are stored whole.
            b = tl.load(w_at + start * 16, mask=(k // 32 * 32 + start < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    to = out + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])
