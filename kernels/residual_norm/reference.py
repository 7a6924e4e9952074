"""Torch reference of `residual_norm`."""

from torch import Tensor

from ouro_build.kernels.rms_norm.reference import normalise
from ouro_build.kernels.rows import active


def residual_norm(
    rows: Tensor, update: Tensor, update_weight: Tensor, stream: Tensor, weight: Tensor, out: Tensor, eps: float
) -> None:
    """Add `norm(update[i]) * update_weight` to active rows' `stream`; `out[i]` = the sum's norm times `weight`."""
    live, _ = active(rows)
    sums = stream[live] + normalise(update[live], update_weight, eps)
    stream[live] = sums
    out[live] = normalise(sums, weight, eps)
