"""The linear layer's arithmetic in torch, shared by its kernels."""

import torch
from torch import Tensor

from ouro_build.kernels.packed.reference import in_rows
from ouro_build.kernels.rows import active

# Weight rows that are widened to float32 at a time: few enough to stay in a core's cache until they are used.
_CHUNK = 512


def project(rows: Tensor, x: Tensor, weight: Tensor, out: Tensor, gather: bool) -> None:
    """`out[i] = weight @ x[i]` for active rows, `x[slot]` with `gather`; float32 products and sums, cast to out's type.

    weight [N / 16, K / 32, 16, 32] in blocks, x [.., K], out [.., N].
    """
    live, slots = active(rows)
    inputs = x[slots if gather else live].float()
    size, width = out.shape[1], x.shape[1]
    result = torch.empty((len(inputs), size), dtype=torch.float32, device=x.device)
    lines = in_rows(weight)
    bands = _CHUNK // lines.shape[1]
    wide = torch.empty((min(bands, len(lines)), *lines.shape[1:]), dtype=torch.float32, device=x.device)
    for band in range(0, len(lines), bands):
        piece = lines[band : band + bands]
        chunk = wide[: len(piece)].copy_(piece).flatten(2).flatten(0, 1)
        first = band * lines.shape[1]
        result[:, first : first + _CHUNK] = inputs @ chunk[: size - first, :width].T
    out[live] = result.to(out.dtype)
