"""Triton source of `kv_copy`: a program copies one block of one row's keys and values of one layer."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def kv_copy(
    rows,
    block_tables,
    kv,
    plane_stride,
    block_stride,
    LAYERS: tl.constexpr,
    LOOPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    record = rows + tl.program_id(0).to(tl.int64) * 8
    layer = tl.program_id(1)
    loop = tl.load(record + 2)
    if (tl.load(record) >= 0) & (loop > 0) & (loop < LOOPS):
        position = tl.load(record + 1)
        request = tl.load(record + 3).to(tl.int64)
        block = tl.load(block_tables + request * TABLE_WIDTH + position // BLOCK_SIZE).to(tl.int64)
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < 2 * KV_HEADS * HEAD_DIM
        # Heads of keys and then of values follow each other in a block, each with BLOCK_SIZE positions.
        offset = (at // HEAD_DIM * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + at % HEAD_DIM
        place = kv + block * block_stride + offset
        x = tl.load(place + ((loop - 1) * LAYERS + layer).to(tl.int64) * plane_stride, mask=inside)
        for skipped in tl.static_range(1, LOOPS):
            if skipped >= loop:
                tl.store(place + (skipped * LAYERS + layer).to(tl.int64) * plane_stride, x, mask=inside)
