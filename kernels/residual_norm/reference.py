"""Torch reference of `residual_norm`."""

from torch import Tensor

from ouro_build.kernels.rms_norm.reference import normalise
from ouro_build.kernels.rows import active


def residual_norm(
    rows: Tensor, update: Tensor, update_weight: Tensor, hidden: Tensor, weight: Tensor, out: Tensor, eps: float
) -> None:
    """Add `norm(update[i]) * update_weight` to the hidden states of active rows; `out[i]` = the sum's norm times `weight`."""
    live, slots = active(rows)
    sums = hidden[slots] + normalise(update[live], update_weight, eps)
    hidden[slots] = sums
    out[live] = normalise(sums, weight, eps)
