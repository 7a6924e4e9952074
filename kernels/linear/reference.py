"""The linear layer's arithmetic in torch, shared by its kernels."""

import torch
from torch import Tensor

from ouro_build.kernels.rows import active

# Weight rows that are widened to float32 at a time: few enough to stay in a core's cache until they are used.
_CHUNK = 512


def project(rows: Tensor, x: Tensor, weight: Tensor, out: Tensor, gather: bool) -> None:
    """`out[i] = weight @ x[i]` for active rows, `x[slot]` with `gather`; float32 products and sums, cast to out's type."""
    live, slots = active(rows)
    inputs = x[slots if gather else live].float()
    size, width = weight.shape
    result = torch.empty((len(inputs), size), dtype=torch.float32, device=x.device)
    wide = torch.empty((min(_CHUNK, size), width), dtype=torch.float32, device=x.device)
    for first in range(0, size, _CHUNK):
        piece = weight[first : first + _CHUNK]
        result[:, first : first + _CHUNK] = inputs @ wide[: len(piece)].copy_(piece).T
    out[live] = result.to(out.dtype)
