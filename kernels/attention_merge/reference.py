"""Torch reference of `attention_merge`."""

import torch
from torch import Tensor

from ouro_build.kernels.rows import active


def attention_merge(rows: Tensor, partial: Tensor, sums: Tensor, out: Tensor) -> None:
    """Weigh the splits of every active row by their maxima, add them in order and normalise."""
    live, _ = active(rows)
    maximum, total = sums[live].unbind(-1)
    parts = torch.where(total[..., None] > 0, partial[live], 0.0)
    share = torch.exp(maximum - maximum.amax(-1, keepdim=True))
    merged = (parts * share[..., None]).sum(2) / (total * share).sum(2)[..., None]
    out[live] = merged.flatten(1).to(out.dtype)
