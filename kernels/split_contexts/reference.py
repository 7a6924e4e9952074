"""Torch reference of `split_contexts`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active
from ouro_build.kernels.split_contexts import EIGHT, SPLIT_RECORD, Split, SplitRule


def split_contexts(
    rows: Tensor,
    batch: Tensor,
    block_tables: Tensor,
    splits: Tensor,
    counts: Tensor,
    TILE: int,
    LEAST: int,
    LONGEST: int,
    SHORTEST: int,
    BLOCK_SIZE: int,
) -> None:
    """List the splits of active rows, and count them."""
    rule = SplitRule(TILE, LEAST, LONGEST, SHORTEST)
    counts.zero_()
    splits[:, Split.ROW] = -1
    written = batch[active(batch)[0]]
    at = 0
    for row in active(rows)[0].tolist():
        _, position, loop, request = rows[row, : Row.REQUEST + 1].tolist()
        same = (written[:, Row.LOOP] == loop) & (written[:, Row.REQUEST] == request)
        settled = min([position, *written[same, Row.POSITION].tolist()])
        count = counts[row] = rule.count(position + 1)
        span = rule.span(position + 1)
        for index in range(count):
            first, end = index * span, min((index + 1) * span, position + 1)
            record = torch.tensor([row, index, count, first, end, request, loop, settled], dtype=torch.int32)
            splits[at, : len(record)] = record
            eights = torch.arange(first, min(first + TILE, end), EIGHT, device=rows.device)
            splits[at, SPLIT_RECORD:] = 0
            splits[at, SPLIT_RECORD : SPLIT_RECORD + len(eights)] = block_tables[request, eights // BLOCK_SIZE]
            at += 1
