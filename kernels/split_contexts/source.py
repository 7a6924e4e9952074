"""Triton source of `split_contexts`: one program a row, which counts the splits of those before it."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def count_splits(
    position, live, TILE: tl.constexpr, LEAST: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr
):  # fmt: skip
    """Splits of rows at `position`, 0 where not `live`, and the keys of each but the last."""
    tiles = position // TILE + 1
    wanted = tl.minimum(tl.maximum(tl.cdiv(tiles, LONGEST), LEAST), tl.cdiv(tiles, SHORTEST))
    span = tl.cdiv(position + 1, wanted * 8) * 8
    return tl.where(live, tl.cdiv(position + 1, span), 0), span


@triton.jit
def split_contexts(
    rows, batch, block_tables, splits, counts, ROWS: tl.constexpr, ROW_TILE: tl.constexpr, MOST: tl.constexpr,
    TILE: tl.constexpr, LEAST: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    WIDTH: tl.constexpr = 8 + TILE // 8
    mine = tl.program_id(0)
    row = tl.arange(0, ROW_TILE)
    live = tl.load(rows + row * 8, mask=row < ROWS, other=-1) >= 0
    position = tl.load(rows + row * 8 + 1, mask=live, other=0)
    every, _ = count_splits(position, live, TILE, LEAST, LONGEST, SHORTEST)
    start = tl.sum(tl.where(row < mine, every, 0), 0)
    total = tl.sum(every, 0)
    tl.store(counts + mine, tl.sum(tl.where(row == mine, every, 0), 0))
    # Programs share the records after the last.
    for unused in range(total + mine, ROWS * MOST, ROWS):
        tl.store(splits + unused * WIDTH, -1)
    slot = tl.load(rows + mine * 8)
    if slot >= 0:
        last = tl.load(rows + mine * 8 + 1)
        loop = tl.load(rows + mine * 8 + 2)
        request = tl.load(rows + mine * 8 + 3)
        written = tl.load(batch + row * 8, mask=row < ROWS, other=-1) >= 0
        written &= tl.load(batch + row * 8 + 2, mask=row < ROWS, other=-1) == loop
        written &= tl.load(batch + row * 8 + 3, mask=row < ROWS, other=-1) == request
        settled = tl.min(tl.where(written, tl.load(batch + row * 8 + 1, mask=row < ROWS, other=0), last), 0)
        count, span = count_splits(last, slot >= 0, TILE, LEAST, LONGEST, SHORTEST)
        table = block_tables + request.to(tl.int64) * TABLE_WIDTH
        eight = tl.arange(0, TILE // 8)
        for index in range(count):
            record = splits + (start + index) * WIDTH
            first = index * span
            end = tl.minimum(first + span, last + 1)
            tl.store(record, mine)
            tl.store(record + 1, index)
            tl.store(record + 2, count)
            tl.store(record + 3, first)
            tl.store(record + 4, end)
            tl.store(record + 5, request)
            tl.store(record + 6, loop)
            tl.store(record + 7, settled)
            key = first + eight * 8
            tl.store(record + 8 + eight, tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0))
