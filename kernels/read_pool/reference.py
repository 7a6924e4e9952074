"""Torch reference of `read_pool`."""

import torch
from torch import Tensor

_WORD = 1 << 32


def read_pool(pool: Tensor, sums: Tensor, PROGRAMS: int, BLOCK: int) -> None:
    """`sums[p]` = the sum modulo 2^32 of the blocks p, p + PROGRAMS, p + 2 PROGRAMS, … of `pool`."""
    turn = PROGRAMS * BLOCK
    whole = len(pool) // turn * turn
    last = pool.new_zeros(turn)
    last[: len(pool) - whole] = pool[whole:]
    total = last.view(PROGRAMS, BLOCK).sum(1, dtype=torch.int64)
    total += pool[:whole].view(-1, PROGRAMS, BLOCK).sum((0, 2), dtype=torch.int64)
    half = _WORD // 2
    sums[:PROGRAMS] = ((total + half) % _WORD - half).to(sums.dtype)
