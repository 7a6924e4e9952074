"""Torch reference of `resolve`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row


def resolve(batch: Tensor, row_state: Tensor, rows: Tensor, loop_limit: int, position_limit: int) -> None:
    """`rows[i]` = the record of slot `batch[i]` where its loop and its position are within their limits, else all -1."""
    rows.fill_(-1)
    slots = batch[: len(rows)]
    named = (slots >= 0).nonzero().squeeze(1)
    states = row_state[slots[named].long()]
    loops, positions = states[:, Row.LOOP], states[:, Row.POSITION]
    live = named[(loops >= 0) & (loops < loop_limit) & (positions >= 0) & (positions < position_limit)]
    rows[live] = row_state[slots[live].long()]
    rows[live, Row.SLOT] = slots[live]
