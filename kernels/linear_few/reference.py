"""Torch reference of `linear_few`."""

from torch import Tensor

from ouro_build.kernels.linear.reference import project


def linear_few(rows: Tensor, x: Tensor, weight: Tensor, out: Tensor, GATHER: bool) -> None:
    """`out[i] = weight @ x[i]` for active rows, `x[slot of row i]` with GATHER."""
    project(rows, x, weight, out, GATHER)
