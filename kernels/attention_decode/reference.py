"""Torch reference of `attention_decode`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.paged_kv.reference import context
from ouro_build.kernels.rows import active


def attention_decode(
    rows: Tensor,
    q: Tensor,
    block_tables: Tensor,
    kv: Tensor,
    partial: Tensor,
    sums: Tensor,
    layer: int,
    scale: float,
    LAYERS: int,
    TILE: int,
) -> None:
    """Each split's unnormalised share of the attention of every active row, its maximum score and its sum."""
    splits = partial.shape[2]
    for row in active(rows)[0].tolist():
        position = int(rows[row, Row.POSITION])
        scores, values = scores_and_values(rows[row], q[row], block_tables, kv, layer, scale, LAYERS)
        span = -(-(position // TILE + 1) // splits) * TILE
        for split in range(splits):
            part = slice(split * span, (split + 1) * span)
            one_split(scores[:, part], values[:, part], partial[row, :, split], sums[row, :, split])


def scores_and_values(
    record: Tensor, q: Tensor, block_tables: Tensor, kv: Tensor, layer: int, scale: float, LAYERS: int
) -> tuple[Tensor, Tensor]:
    """Of one row over its whole context: scores [heads, n] and every head's values [heads, n, head_dim], float32."""
    _, position, loop, request = record[: Row.REQUEST + 1].tolist()
    keys, values = context(kv, block_tables[request], loop * LAYERS + layer, position + 1)
    group = len(q) // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    return torch.einsum("hd,hpd->hp", q.float(), keys) * scale, values


def one_split(scores: Tensor, values: Tensor, partial: Tensor, sums: Tensor) -> None:
    """scores [heads, n], values [heads, n, head_dim] -> partial [heads, head_dim], sums [heads, 2]."""
    if scores.shape[1] == 0:
        sums[:, 0], sums[:, 1] = float("-inf"), 0.0
        return
    maximum = scores.amax(1, keepdim=True)
    weights = torch.exp(scores - maximum)
    partial[:] = torch.einsum("hp,hpd->hd", weights, values)
    sums[:, 0], sums[:, 1] = maximum[:, 0], weights.sum(1)
