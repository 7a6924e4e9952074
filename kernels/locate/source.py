"""Triton source of `locate`: one program a row."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def locate(
    rows, inv_freq, block_tables, blocks, rotation, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    frequency = tl.load(inv_freq + at, mask=inside, other=0.0)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * 8
    if tl.load(record) >= 0:
        position = tl.load(record + 1)
        request = tl.load(record + 3).to(tl.int64)
        block = tl.load(block_tables + request * TABLE_WIDTH + position // BLOCK_SIZE)
        tl.store(blocks + row, block)
        if block < 0:
            tl.store(record, -1)
        angle = position.to(tl.float32) * frequency
        to = rotation + row * (2 * HALF) + at
        tl.store(to, tl.cos(angle), mask=inside)
        tl.store(to + HALF, tl.sin(angle), mask=inside)
