"""Torch reference of `attention_decode`."""

import torch
from torch import Tensor

from ouro_build.kernels.paged_kv.reference import context
from ouro_build.kernels.split_contexts import Split


def attention_decode(
    splits: Tensor, q: Tensor, block_tables: Tensor, kv: Tensor, out: Tensor, layer: int, scale: float, LAYERS: int
) -> None:
    """Attention of every row that has splits, over all that its splits cover."""
    first = splits[(splits[:, Split.ROW] >= 0) & (splits[:, Split.INDEX] == 0)]
    for record in first.tolist():
        row = record[Split.ROW]
        end = int(splits[splits[:, Split.ROW] == row, Split.END].max())
        plane = record[Split.LOOP] * LAYERS + layer
        keys, values = context(kv, block_tables[record[Split.REQUEST]], plane, end)
        group = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("hd,hpd->hp", q[row].float(), keys) * scale
        attended = torch.einsum("hp,hpd->hd", scores.softmax(-1), values)
        out[row] = attended.flatten().to(out.dtype)
