"""Torch reference of `linear_silu`."""

import torch
from torch import Tensor

from ouro_build.kernels.linear.reference import project
from ouro_build.kernels.silu_mul.reference import silu_mul


def linear_silu(rows: Tensor, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """`silu_mul` of the linear layer's output."""
    gate_up = torch.empty((len(rows), 2 * out.shape[1]), dtype=out.dtype, device=out.device)
    project(rows, x, weight, gate_up, False)
    silu_mul(rows, gate_up, out)
