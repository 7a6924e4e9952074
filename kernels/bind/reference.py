"""Torch reference of `bind`."""

from torch import Tensor

from ouro_build.artifacts.rows import InputColumn, Row

_OVERRIDES = (
    (InputColumn.TOKEN, Row.TOKEN),
    (InputColumn.POSITION, Row.POSITION),
    (InputColumn.REQUEST, Row.REQUEST),
    (InputColumn.MODE, Row.MODE),
    (InputColumn.REFERENCE_SLOT, Row.REFERENCE_SLOT),
    (InputColumn.GENERATION, Row.GENERATION),
)


def bind(inputs: Tensor, row_state: Tensor, block_tables: Tensor, bucket: int, BLOCK_SIZE: int) -> None:
    """Apply the first `bucket` row inputs to the state of their slots, and enter their blocks."""
    given = inputs[:bucket]
    given = given[given[:, InputColumn.SLOT] >= 0]
    running = row_state[given[:, InputColumn.SLOT].long(), Row.LOOP] >= 0
    given = given[running | (given[:, InputColumn.POSITION] >= 0)]
    slots = given[:, InputColumn.SLOT].long()

    state = row_state[slots]
    for source, target in _OVERRIDES:
        state[:, target] = given[:, source].where(given[:, source] >= 0, state[:, target])
    state[:, Row.SLOT] = given[:, InputColumn.SLOT]
    state[:, Row.LOOP] = 0
    row_state[slots] = state

    count, width = block_tables.shape
    requests, positions = state[:, Row.REQUEST].long(), state[:, Row.POSITION].long()
    inside = (requests >= 0) & (requests < count) & (positions >= 0) & (positions < width * BLOCK_SIZE)
    entered = inside & (given[:, InputColumn.BLOCK] >= 0)
    block_tables[requests[entered], positions[entered] // BLOCK_SIZE] = given[entered, InputColumn.BLOCK]
