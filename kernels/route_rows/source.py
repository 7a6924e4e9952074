"""Triton source of `route_rows`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def route_rows(
    rows, dense_rows, capture_rows, sparse_rows, SOURCE_LOOP: tl.constexpr, CAPTURES: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    at = tl.program_id(0) * 8 + tl.arange(0, 8)
    slot = tl.load(rows + tl.program_id(0) * 8)
    loop = tl.load(rows + tl.program_id(0) * 8 + 2)
    mode = tl.load(rows + tl.program_id(0) * 8 + 4)
    active = slot >= 0
    capture = active & (mode == 1) & (loop == SOURCE_LOOP) & CAPTURES
    consume = active & ((mode == 2) | ((mode == 1) & (loop > SOURCE_LOOP)))
    now = tl.where(consume, 2, tl.where(capture, 1, 0))
    record = tl.where(tl.arange(0, 8) == 4, now, tl.load(rows + at))
    tl.store(dense_rows + at, tl.where(active & (now != 2), record, -1))
    tl.store(capture_rows + at, tl.where(capture, record, -1))
    tl.store(sparse_rows + at, tl.where(capture | consume, record, -1))
