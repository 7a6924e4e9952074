"""Torch reference of `bind`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row, RowInput

_OVERRIDES = (
    (RowInput.TOKEN, Row.TOKEN),
    (RowInput.POSITION, Row.POSITION),
    (RowInput.REQUEST, Row.REQUEST),
    (RowInput.MODE, Row.MODE),
    (RowInput.REFERENCE_SLOT, Row.REFERENCE_SLOT),
    (RowInput.GENERATION, Row.GENERATION),
)


def bind(inputs: Tensor, row_state: Tensor, block_tables: Tensor, bucket: int, BLOCK_SIZE: int) -> None:
    """Apply the first `bucket` row inputs to the state of their slots, and enter their blocks."""
    given = inputs[:bucket]
    given = given[given[:, RowInput.SLOT] >= 0]
    running = row_state[given[:, RowInput.SLOT].long(), Row.LOOP] >= 0
    given = given[running | (given[:, RowInput.POSITION] >= 0)]
    slots = given[:, RowInput.SLOT].long()

    state = row_state[slots]
    for source, target in _OVERRIDES:
        state[:, target] = given[:, source].where(given[:, source] >= 0, state[:, target])
    state[:, Row.SLOT] = given[:, RowInput.SLOT]
    state[:, Row.LOOP] = 0
    row_state[slots] = state

    entered = given[:, RowInput.BLOCK] >= 0
    requests, positions = state[entered, Row.REQUEST].long(), state[entered, Row.POSITION].long()
    block_tables[requests, positions // BLOCK_SIZE] = given[entered, RowInput.BLOCK]
