"""Torch reference of `attention_select`: the definition of what a row retains."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import ReferenceRecord, Row
from ouro_build.kernels.references.reference import with_slot


def retained_keys(scores: Tensor, count: int) -> Tensor:
    """Of scores [heads, n] the int64 [heads, count] indices of each head's largest: of equal ones the first; ascending."""
    # A stable sort keeps equal scores in the order of their indices.
    ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices
    return ranked[:, :count].sort(1).values


def attention_select(
    rows: Tensor,
    counts: Tensor,
    scores: Tensor,
    sums: Tensor,
    retained_counts: Tensor,
    reference_records: Tensor,
    reference_mass: Tensor,
    reference_keys: Tensor,
    layer: int,
) -> None:
    """Keys, mass and record of every row that has a reference slot."""
    for row, slot in with_slot(rows, len(reference_records)):
        n = int(rows[row, Row.POSITION]) + 1
        count = int(retained_counts[n])
        found = scores[row, :, :n]
        keys = retained_keys(found, count)
        maximum, total = sums[row, :, : counts[row]].unbind(-1)
        top = maximum.amax(1, keepdim=True)
        every = (total * torch.exp(maximum - top)).sum(1)
        reference_keys[slot, layer, :, :count] = keys.int()
        reference_mass[slot, layer] = torch.exp(found.gather(1, keys) - top).sum(1) / every
        reference_records[slot, layer, ReferenceRecord.GENERATION] = rows[row, Row.GENERATION]
        reference_records[slot, layer, ReferenceRecord.COUNT] = count
