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
    parts = [inputs @ piece.float().T for piece in torch.split(weight, _CHUNK)]
    out[live] = torch.cat(parts, 1).to(out.dtype)
