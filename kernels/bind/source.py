"""Triton source of `bind`: one thread a record. `given` is in columns of `InputColumn`, `state` of `Row`."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def _override(given_at, state_at, live):
    """Store what is given; return what the state then holds."""
    given = tl.load(given_at, mask=live, other=-1)
    held = tl.load(state_at, mask=live, other=-1)
    tl.store(state_at, given, mask=live & (given >= 0))
    return tl.where(given >= 0, given, held)


@triton.jit
def bind(
    inputs, row_state, block_tables, bucket, BLOCK_SIZE: tl.constexpr, REQUESTS: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    given = inputs + row.to(tl.int64) * 8
    slot = tl.load(given, mask=row < bucket, other=-1)
    named = slot >= 0
    state = row_state + slot.to(tl.int64) * 8
    placed = tl.load(given + 2, mask=named, other=-1) >= 0
    running = tl.load(state + 2, mask=named, other=-1) >= 0
    live = named & (placed | running)

    position = _override(given + 2, state + 1, live)
    request = _override(given + 3, state + 3, live)
    _override(given + 1, state + 7, live)  # token
    _override(given + 5, state + 4, live)  # mode
    _override(given + 6, state + 5, live)  # reference slot
    _override(given + 7, state + 6, live)  # generation
    tl.store(state, slot, mask=live)
    tl.store(state + 2, tl.zeros_like(slot), mask=live)  # loop

    block = tl.load(given + 4, mask=live, other=-1)
    entry = block_tables + request.to(tl.int64) * TABLE_WIDTH + position // BLOCK_SIZE
    inside = (request >= 0) & (request < REQUESTS) & (position >= 0) & (position < TABLE_WIDTH * BLOCK_SIZE)
    tl.store(entry, block, mask=inside & (block >= 0))
