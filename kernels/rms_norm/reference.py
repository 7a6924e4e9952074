"""Torch reference of `rms_norm`."""

import torch
from torch import Tensor

from ouro_build.kernels.rows import active


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension: in float32, cast to the weight's type, then times the weight."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(weight.dtype) * weight


def rms_norm(rows: Tensor, hidden: Tensor, weight: Tensor, residual: Tensor, out: Tensor, eps: float) -> None:
    """Copy active rows' hidden states to `residual`; `out` = their norm times `weight`."""
    live, slots = active(rows)
    residual[live] = hidden[slots]
    out[live] = normalise(hidden[slots], weight, eps)
