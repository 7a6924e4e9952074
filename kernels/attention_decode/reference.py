"""Torch reference of `attention_decode`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
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
        scores, values = scores_and_values((request, loop, first, end), q[row], block_tables, kv, layer, scale, LAYERS)
        one_split(scores, values, partial[row, :, index], sums[row, :, index])


def whole_context(record: Tensor) -> tuple[int, int, int, int]:
    """Request, loop, first position and the one after the last of all keys of the row that has this record."""
    _, position, loop, request = record[: Row.REQUEST + 1].tolist()
    return request, loop, 0, position + 1


def scores_and_values(
    of: tuple[int, int, int, int], q: Tensor, block_tables: Tensor, kv: Tensor, layer: int, scale: float, LAYERS: int
) -> tuple[Tensor, Tensor]:
    """`of` as `whole_context` gives it, for n keys: scores [heads, n] and every head's values [heads, n, head_dim], float32."""
    request, loop, first, end = of
    keys, values = context(kv, block_tables[request], loop * LAYERS + layer, end)
    group = len(q) // len(keys)
    keys, values = (t[:, first:].repeat_interleave(group, 0) for t in (keys, values))
    return torch.einsum("hd,hpd->hp", q.float(), keys) * scale, values


def one_split(scores: Tensor, values: Tensor, partial: Tensor, sums: Tensor) -> None:
    """scores [heads, n], values [heads, n, head_dim] -> partial [heads, head_dim], sums [heads, 2]. n = 0 leaves partial."""
    if scores.shape[1] == 0:
        sums[:, 0], sums[:, 1] = float("-inf"), 0.0
        return
    maximum = scores.amax(1, keepdim=True)
    weights = torch.exp(scores - maximum)
    partial[:] = torch.einsum("hp,hpd->hd", weights, values)
    sums[:, 0], sums[:, 1] = maximum[:, 0], weights.sum(1)
