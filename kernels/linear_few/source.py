"""Triton source of `linear_few`. Both forms read every weight once, in 16-byte loads that are under way before their use."""

# ruff: noqa: RUF005 - Triton has no unpacking in a tuple
# mypy: disable-error-code="assignment,var-annotated"
# (tuples of loads grow while loops are unrolled)

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.packed.source import column_offset, row_offset
from ouro_build.kernels.sums.source import sum_first


@triton.jit
def load_ahead(at, k, STEP: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr, K: tl.constexpr):
    """Weights of step STEP, each of SPAN columns for each of WARPS. They are not read again: evicting them first leaves the
    cache to the activations. `k` are the first columns of blocks of 32, which are stored whole."""
    if (K + 31) // 32 * 32 % (WARPS * SPAN) == 0:
        loaded = tl.load(at + STEP * SPAN * 16, eviction_policy="evict_first")
    else:
        loaded = tl.load(at + STEP * SPAN * 16, mask=k + STEP * SPAN < K, other=0.0, eviction_policy="evict_first")
    return loaded


@triton.jit
def load_rows(
    at, present, k, STEP: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Activations of one step; of rows that are not `present` none, if MASKED."""
    if MASKED:
        inside = present if EVEN else present & (k + STEP * SPAN < K)
        loaded = tl.load(at + STEP * SPAN, mask=inside, other=0.0)
    elif EVEN:
        loaded = tl.load(at + STEP * SPAN)
    else:
        loaded = tl.load(at + STEP * SPAN, mask=k + STEP * SPAN < K, other=0.0)
    return loaded


@triton.jit
def products(
    rows, x, weight, out, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Multiply-adds over tiles [row, n, k]; what a thread loads at once it also sums at once."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    first = tl.program_id(0) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    # Rows of weights past the end repeat the last: the loads need no mask, the store has one.
    w_at = weight + row_offset(tl.minimum(first + n, N - 1), K)[None, :, None] + column_offset(k)
    w_k = k // 32 * 32
    ahead = ()
    for step in tl.static_range(AHEAD):
        ahead = ahead + (load_ahead(w_at, w_k, step, BLOCK_K, 1, K),)
    wait(PROGRAMMATIC)
    row = tl.arange(0, ROW_TILE)
    written = row < ROWS
    at = tl.minimum(row, ROWS - 1)
    if GATHER:  # A slot may be read, and a row of the output written, only if a row is in it.
        at = tl.load(rows + at * 8)
        written = written & (at >= 0)
    present = (at >= 0)[:, None, None]
    x_at = x + at.to(tl.int64)[:, None, None] * K + k
    acc = tl.zeros((ROW_TILE, BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    for step in tl.static_range(STEPS):
        if step + AHEAD < STEPS:
            ahead = ahead + (load_ahead(w_at, w_k, step + AHEAD, BLOCK_K, 1, K),)
        a = load_rows(x_at, present, k, step, BLOCK_K, EVEN, GATHER, K)
        product = ahead[step].to(tl.float32) * a.to(tl.float32)
        acc += tl.sum(product.reshape(ROW_TILE, BLOCK_N, BLOCK_K // VECTOR, VECTOR), 3)
    total = tl.sum(acc, 2)
    to = out + row.to(tl.int64)[:, None] * N + (first + n)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=written[:, None] & (first + n < N)[None, :])


@triton.jit
def fragment_rows(ROW_TILE: tl.constexpr):
    """Which row of a tile each column of the product is for, [eight columns, column of the eight]; see `multiply`."""
    MT: tl.constexpr = ROW_TILE // 8 if ROW_TILE > 8 else 1
    column = (tl.arange(0, MT) * 8)[:, None] + tl.arange(0, 8)[None, :]
    return column % ROW_TILE  # of fewer than eight rows each has several


@triton.jit
def fragment_places(
    weight, n, K: tl.constexpr, BLOCK_K: tl.constexpr, K_WARPS: tl.constexpr,
):  # fmt: skip
    """Where weight rows `n` [eight rows, 8] lie, [eight rows, group of 32, warp, row of the eight, k], and the first columns of
    these groups, in the first step. Eight rows of a group are 512 bytes in a row."""
    STEPS: tl.constexpr = (K + K_WARPS * BLOCK_K - 1) // (K_WARPS * BLOCK_K)
    warp = tl.arange(0, K_WARPS) * (STEPS * BLOCK_K)
    group = tl.arange(0, BLOCK_K // 32) * 32
    j = tl.arange(0, 32)
    k = warp[None, None, :, None, None] + group[None, :, None, None, None]
    # Groups are added last and alone: so they are constants in the addresses of a thread's loads.
    at = weight + row_offset(n, K)[:, None, None, :, None] + j[None, None, None, None, :] + warp[None, None, :, None, None] * 16
    return at + group[None, :, None, None, None] * 16, k


@triton.jit
def early(weight, n, K: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, K_WARPS: tl.constexpr):
    """The first AHEAD steps' weights for `multiply`, to be loaded before the wait."""
    w_at, k = fragment_places(weight, n, K, BLOCK_K, K_WARPS)
    ahead = ()
    for step in tl.static_range(AHEAD):
        ahead = ahead + (load_ahead(w_at, k, step, BLOCK_K, K_WARPS, K),)
    return ahead


@triton.jit
def places_in_group(FEW: tl.constexpr):
    """Where in a group of 32 columns of x loads begin, [load, 1, 1, 1, 1], and what each takes from there, [1, 1, 1, column of
    the eight, k]: if FEW, the pairs of the column's rh, one load for either kh (see `multiply`), else all in one."""
    if FEW:
        load = (tl.arange(0, 2) * 4)[:, None, None, None, None]  # kh
        rh = (tl.arange(0, 8) // 4 * 2)[None, None, None, :, None]
        j = tl.arange(0, 8)
        taken = rh + (j // 2 * 8 + j % 2)[None, None, None, None, :]
    else:
        load = tl.zeros((1, 1, 1, 1, 1), tl.int32)
        taken = tl.arange(0, 32)[None, None, None, None, :]
    return load, taken


@triton.jit
def operands(
    w, x, FEW: tl.constexpr, EIGHTS: tl.constexpr, GROUPS: tl.constexpr, MT: tl.constexpr, K_WARPS: tl.constexpr,
):  # fmt: skip
    """Loaded weights and activations as a dot of each warp takes them."""
    if FEW:
        a = w.reshape(EIGHTS, GROUPS, K_WARPS, 8, 4, 2, 2, 2).permute(2, 0, 6, 3, 1, 5, 4, 7)
        a = a.reshape(K_WARPS, EIGHTS * 16, GROUPS * 16)
        b = x.reshape(GROUPS, 2, K_WARPS, 8, 4, 2).permute(2, 0, 1, 4, 5, 3).reshape(K_WARPS, GROUPS * 16, 8)
    else:
        a = w.reshape(EIGHTS, GROUPS, K_WARPS, 8, 4, 2, 2, 2).permute(2, 0, 3, 1, 5, 6, 4, 7)
        a = a.reshape(K_WARPS, EIGHTS * 8, GROUPS * 32)
        b = x.reshape(GROUPS, MT, K_WARPS, 8, 4, 2, 2, 2).permute(2, 0, 5, 6, 4, 7, 1, 3)
        b = b.reshape(K_WARPS, GROUPS * 32, MT * 8)
    return a, b


@triton.jit
def of_few(product, K_WARPS: tl.constexpr, EIGHTS: tl.constexpr, ROW_TILE: tl.constexpr):
    """Of the products for few rows [warp, row of the tile, column] those that were asked for, [warp, weight row, row]; see
    `multiply`."""
    EQUAL: tl.constexpr = 4 // ROW_TILE  # columns of one rh and row
    product = product.reshape(K_WARPS, EIGHTS, 2, 8, 2, EQUAL, ROW_TILE)
    first, second = tl.split(product.permute(0, 1, 3, 4, 5, 6, 2))
    rh = tl.arange(0, 2)[None, None, None, :, None, None]
    kept = tl.max(tl.where(rh == 0, first, second), 4)
    return tl.sum(kept, 3).reshape(K_WARPS, EIGHTS * 8, ROW_TILE)


@triton.jit
def multiply(
    ahead, x, row, present, weight, n, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr,
    AHEAD: tl.constexpr, X_AHEAD: tl.constexpr, K_WARPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`weight[n] @ x[row]`, float32 [BLOCK_N, ROW_TILE], on tensor cores with no shared memory before them.

    `n` [BLOCK_N / 8, 8] are the weight rows of which `early` has loaded the first steps, `row` the rows of x, as
    `fragment_rows`; if MASKED, 0 stands for those that are not `present`. Otherwise an inactive row's x is read too, whatever
    it holds, so that no load waits for row records.

    In a group of 32 along K, a thread's 16 bytes hold k = 8c .. 8c+7 of one weight row: four pairs p of k = 8c + 2p + e. As an
    operand of mma.m16n8k16 it gives four pairs: of the tile's rows g and g + 8, those that stand for k = 2c + e and for 8 more.
    The order along K is free, as long as activations are permuted alike.

    For a tile of up to 4 rows (FEW), both of these rows are one weight row: with p = 2 kh + rh, row g has the pairs of rh = 0,
    row g + 8 those of rh = 1. So a load is an operand as it is. Activations have columns for either rh, as many for each row as
    there is room for, and of the products those are kept whose rh is the same. From 5 rows on that would take a second tile of
    columns (`bench decode`, 8 rows: 5.34 ms a step instead of 4.77 on an H200, 2026-11-30). There they are two weight rows,
    p = 2 t + kh in step t, and the registers of two loads are moved together for two operands.

    Each warp takes a part of K (the batch of the dot).
    """
    GROUPS: tl.constexpr = BLOCK_K // 32
    STEPS: tl.constexpr = (K + K_WARPS * BLOCK_K - 1) // (K_WARPS * BLOCK_K)
    EVEN: tl.constexpr = K % (K_WARPS * BLOCK_K) == 0
    EIGHTS: tl.constexpr = BLOCK_N // 8
    FEW: tl.constexpr = ROW_TILE <= 4
    MT: tl.constexpr = row.shape[0]
    w_at, w_k = fragment_places(weight, n, K, BLOCK_K, K_WARPS)
    # [group, load, eight columns, warp, column of the eight, k]
    present = present[None, None, :, None, :, None]
    warp = (tl.arange(0, K_WARPS) * (STEPS * BLOCK_K))[None, None, None, :, None, None]
    load, taken = places_in_group(FEW)
    taken = warp + taken[None, :, :, :, :, :]
    load = (tl.arange(0, GROUPS) * 32)[:, None, None, None, None, None] + load[None, :, :, :, :, :]
    x_k = taken + load
    # What is a constant in the addresses of a thread's loads is added last, as in `fragment_places`.
    x_at = x + row.to(tl.int64)[None, None, :, None, :, None] * K + taken + load
    xs = ()
    for step in tl.static_range(X_AHEAD):
        xs = xs + (load_rows(x_at, present, x_k, step, BLOCK_K, EVEN, MASKED, K),)
    acc = tl.zeros((K_WARPS, 2 * BLOCK_N if FEW else BLOCK_N, 8 * MT), tl.float32)
    for step in tl.static_range(STEPS):
        if step + AHEAD < STEPS:
            ahead = ahead + (load_ahead(w_at, w_k, step + AHEAD, BLOCK_K, K_WARPS, K),)
        if step + X_AHEAD < STEPS:
            xs = xs + (load_rows(x_at, present, x_k, step + X_AHEAD, BLOCK_K, EVEN, MASKED, K),)
        a, b = operands(ahead[step], xs[step], FEW, EIGHTS, GROUPS, MT, K_WARPS)
        acc = tl.dot(a, b, acc)
    if FEW:
        acc = of_few(acc, K_WARPS, EIGHTS, ROW_TILE)
    return sum_first(acc, K_WARPS)


@triton.jit
def fragments(
    rows, x, weight, out, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr,
    K_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Tensor cores: see `multiply`."""
    first = tl.program_id(0) * BLOCK_N
    n = first + (tl.arange(0, BLOCK_N // 8) * 8)[:, None] + tl.arange(0, 8)[None, :]
    if N % BLOCK_N != 0:
        # Rows of weights past the end repeat the last: the loads need no mask, the store has one.
        n = tl.minimum(n, N - 1)
    ahead = early(weight, n, K, BLOCK_K, AHEAD, K_WARPS)
    wait(PROGRAMMATIC)
    row = tl.arange(0, ROW_TILE)
    written = row < ROWS
    each = tl.minimum(fragment_rows(ROW_TILE), ROWS - 1)
    if GATHER:  # A slot may be read, and a row of the output written, only if a row is in it.
        written = tl.load(rows + row * 8, mask=written, other=-1) >= 0
        each = tl.load(rows + each * 8)
    total = multiply(
        ahead, x, each, each >= 0, weight, n, K, BLOCK_N, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, GATHER
    )  # fmt: skip
    n = first + tl.arange(0, BLOCK_N)
    to = out + row.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=written[None, :] & (n < N)[:, None])


@triton.jit
def linear_few(
    rows, x, weight, out, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, ROW_TILE: tl.constexpr, AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr, K_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    if K_WARPS == 0:
        products(rows, x, weight, out, ROWS, N, K, GATHER, BLOCK_N, BLOCK_K, VECTOR, ROW_TILE, AHEAD, PROGRAMMATIC)
    else:
        fragments(rows, x, weight, out, ROWS, N, K, GATHER, BLOCK_N, BLOCK_K, ROW_TILE, AHEAD, X_AHEAD, K_WARPS, PROGRAMMATIC)
