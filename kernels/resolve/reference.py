"""Torch reference of `resolve`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row


def resolve(batch: Tensor, row_state: Tensor, rows: Tensor, loop_limit: int) -> None:
    """`rows[i]` = the record of slot `batch[i]` where its loop is in 0 … loop_limit - 1, else all -1."""
    rows.fill_(-1)
    slots = batch[: len(rows)]
    named = (slots >= 0).nonzero().squeeze(1)
    loops = row_state[slots[named].long(), Row.LOOP]
    live = named[(loops >= 0) & (loops < loop_limit)]
    rows[live] = row_state[slots[live].long()]
    rows[live, Row.SLOT] = slots[live]
