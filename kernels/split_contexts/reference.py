"""Torch reference of `split_contexts`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active
from ouro_build.kernels.split_contexts import Split, SplitRule


def split_contexts(rows: Tensor, splits: Tensor, arrived: Tensor, TILE: int, LEAST: int, LONGEST: int, SHORTEST: int) -> None:
    """List the splits of active rows; no program has arrived at any."""
    rule = SplitRule(TILE, LEAST, LONGEST, SHORTEST)
    arrived.zero_()
    splits[:, Split.ROW] = -1
    at = 0
    for row in active(rows)[0].tolist():
        _, position, loop, request = rows[row, : Row.REQUEST + 1].tolist()
        count = rule.count(position + 1)
        span = -(-(position // TILE + 1) // count) * TILE
        for index in range(count):
            record = [row, index, count, index * span, min((index + 1) * span, position + 1), request, loop]
            splits[at, : len(record)] = torch.tensor(record, dtype=torch.int32)
            at += 1
