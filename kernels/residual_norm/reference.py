"""Torch reference of `residual_norm`."""

from torch import Tensor

from ouro_build.kernels.rms_norm.reference import normalise
from ouro_build.kernels.rows import active


def residual_norm(
    rows: Tensor, update: Tensor, update_weight: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float
) -> None:
    """Add `norm(update[i]) * update_weight` to active rows' `residual`; `out[i]` = the sum's norm times `weight`."""
    live, _ = active(rows)
    sums = residual[live] + normalise(update[live], update_weight, eps)
    residual[live] = sums
    out[live] = normalise(sums, weight, eps)
