"""Triton source of `bind`: one thread a record."""

import triton
import triton.language as tl

from ouro_build.artifacts.rows import RECORD, Row, RowInput

_RECORD = tl.constexpr(RECORD)
_SLOT, _POSITION, _LOOP = (tl.constexpr(int(c)) for c in (Row.SLOT, Row.POSITION, Row.LOOP))
_REQUEST, _MODE, _TOKEN = (tl.constexpr(int(c)) for c in (Row.REQUEST, Row.MODE, Row.TOKEN))
_REFERENCE_SLOT, _GENERATION = (tl.constexpr(int(c)) for c in (Row.REFERENCE_SLOT, Row.GENERATION))
_IN_SLOT, _IN_POSITION, _IN_BLOCK = (tl.constexpr(int(c)) for c in (RowInput.SLOT, RowInput.POSITION, RowInput.BLOCK))
_IN_REQUEST, _IN_MODE, _IN_TOKEN = (tl.constexpr(int(c)) for c in (RowInput.REQUEST, RowInput.MODE, RowInput.TOKEN))
_IN_REFERENCE_SLOT, _IN_GENERATION = (tl.constexpr(int(c)) for c in (RowInput.REFERENCE_SLOT, RowInput.GENERATION))


@triton.jit
def _override(given_at, state_at, live):
    """Store what is given; return what the state then holds."""
    given = tl.load(given_at, mask=live, other=-1)
    held = tl.load(state_at, mask=live, other=-1)
    tl.store(state_at, given, mask=live & (given >= 0))
    return tl.where(given >= 0, given, held)


@triton.jit
def bind(inputs, row_state, block_tables, bucket, BLOCK_SIZE: tl.constexpr, TABLE_WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    given = inputs + row.to(tl.int64) * _RECORD
    slot = tl.load(given + _IN_SLOT, mask=row < bucket, other=-1)
    named = slot >= 0
    state = row_state + slot.to(tl.int64) * _RECORD
    placed = tl.load(given + _IN_POSITION, mask=named, other=-1) >= 0
    running = tl.load(state + _LOOP, mask=named, other=-1) >= 0
    live = named & (placed | running)

    _override(given + _IN_TOKEN, state + _TOKEN, live)
    _override(given + _IN_MODE, state + _MODE, live)
    _override(given + _IN_REFERENCE_SLOT, state + _REFERENCE_SLOT, live)
    _override(given + _IN_GENERATION, state + _GENERATION, live)
    position = _override(given + _IN_POSITION, state + _POSITION, live)
    request = _override(given + _IN_REQUEST, state + _REQUEST, live)
    tl.store(state + _SLOT, slot, mask=live)
    tl.store(state + _LOOP, tl.zeros_like(slot), mask=live)

    block = tl.load(given + _IN_BLOCK, mask=live, other=-1)
    entry = block_tables + request.to(tl.int64) * TABLE_WIDTH + position // BLOCK_SIZE
    tl.store(entry, block, mask=block >= 0)
