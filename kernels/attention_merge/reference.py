"""Torch reference of `attention_merge`."""

import torch
from torch import Tensor


def attention_merge(counts: Tensor, partial: Tensor, sums: Tensor, out: Tensor) -> None:
    """Weigh the splits of every active row by their maxima, add them in order and normalise."""
    for row in counts.nonzero().squeeze(1).tolist():
        maximum, total = sums[row, :, : counts[row]].unbind(-1)
        share = torch.exp(maximum - maximum.amax(-1, keepdim=True))
        merged = (partial[row, :, : counts[row]] * share[..., None]).sum(1) / (total * share).sum(1)[:, None]
        out[row] = merged.flatten().to(out.dtype)
