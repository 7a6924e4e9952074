"""Torch reference of `attention_decode`."""

import torch
from torch import Tensor

from ouro_build.kernels.paged_kv.reference import context
from ouro_build.kernels.split_contexts import Split


def attention_decode(
    splits: Tensor,
    q: Tensor,
    block_tables: Tensor,
    kv: Tensor,
    partial: Tensor,
    sums: Tensor,
    layer: int,
    scale: float,
    LAYERS: int,
) -> None:
    """Each split's unnormalised share of its row's attention, its maximum score and its sum."""
    for record in splits[splits[:, Split.ROW] >= 0].tolist():
        row, index, _, first, end, request, loop = record[: Split.LOOP + 1]
        keys, values = context(kv, block_tables[request], loop * LAYERS + layer, end)
        group = q.shape[1] // keys.shape[0]
        keys, values = (t[:, first:].repeat_interleave(group, 0) for t in (keys, values))
        scores = torch.einsum("hd,hpd->hp", q[row].float(), keys) * scale
        maximum = scores.amax(1, keepdim=True)
        weights = torch.exp(scores - maximum)
        partial[row, :, index] = torch.einsum("hp,hpd->hd", weights, values)
        sums[row, :, index, 0], sums[row, :, index, 1] = maximum[:, 0], weights.sum(1)
