"""Triton source of `split_contexts`: one program."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def split_contexts(
    rows, splits, arrived, ROWS: tl.constexpr, ROW_TILE: tl.constexpr, MOST: tl.constexpr, COUNTERS: tl.constexpr,
    TILE: tl.constexpr, LEAST: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.arange(0, ROW_TILE)
    record = rows + row * 8
    live = tl.load(record, mask=row < ROWS, other=-1) >= 0
    position = tl.load(record + 1, mask=live, other=0)
    loop = tl.load(record + 2, mask=live, other=0)
    request = tl.load(record + 3, mask=live, other=0)
    tiles = position // TILE + 1
    wanted = tl.minimum(tl.maximum(tl.cdiv(tiles, LONGEST), LEAST), tl.cdiv(tiles, SHORTEST))
    each = tl.cdiv(tiles, wanted)
    count = tl.where(live, tl.cdiv(tiles, each), 0)
    start = tl.cumsum(count, 0) - count
    span = each * TILE
    for index in range(tl.max(count, 0)):
        to = splits + (start + index) * 8
        mine = index < count
        tl.store(to, row, mask=mine)
        tl.store(to + 1, row * 0 + index, mask=mine)
        tl.store(to + 2, count, mask=mine)
        tl.store(to + 3, span * index, mask=mine)
        tl.store(to + 4, tl.minimum(span * (index + 1), position + 1), mask=mine)
        tl.store(to + 5, request, mask=mine)
        tl.store(to + 6, loop, mask=mine)
    for first in range(tl.sum(count, 0), ROWS * MOST, ROW_TILE):
        tl.store(splits + (first + row) * 8, row * 0 - 1, mask=first + row < ROWS * MOST)
    for first in range(0, COUNTERS, ROW_TILE):
        tl.store(arrived + first + row, row * 0, mask=first + row < COUNTERS)
