"""Torch reference of `advance`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active


def advance(rows: Tensor, tokens: Tensor, row_state: Tensor) -> None:
    """Active rows' states take their tokens, the next position and loop 0."""
    live, slots = active(rows)
    row_state[slots, Row.TOKEN] = tokens[live]
    row_state[slots, Row.POSITION] = rows[live, Row.POSITION] + 1
    row_state[slots, Row.LOOP] = 0
