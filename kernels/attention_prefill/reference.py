"""Torch reference of `attention_prefill`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.paged_kv.reference import context
from ouro_build.kernels.rows import active


def attention_prefill(
    rows: Tensor, q: Tensor, block_tables: Tensor, kv: Tensor, out: Tensor, layer: int, scale: float, LAYERS: int
) -> None:
    """Causal attention of every active row over its request's context, in float32; a (request, loop) at a time."""
    live, _ = active(rows)
    owners = rows[live][:, [Row.REQUEST, Row.LOOP]]
    for request, loop in torch.unique(owners, dim=0).tolist():
        mine = live[(owners[:, 0] == request) & (owners[:, 1] == loop)]
        positions = rows[mine, Row.POSITION].long()
        length = int(positions.max()) + 1
        keys, values = context(kv, block_tables[request], loop * LAYERS + layer, length)
        group = q.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("rhd,hpd->hrp", q[mine].float(), keys) * scale
        future = torch.arange(length, device=rows.device)[None, :] > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hrp,hpd->rhd", weights, values).flatten(1).to(out.dtype)
