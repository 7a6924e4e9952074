"""Torch reference of `linear_many`."""

from torch import Tensor

from ouro_build.kernels.linear.reference import project


def linear_many(rows: Tensor, x: Tensor, weight: Tensor, out: Tensor, GATHER: bool) -> None:
    """`out[i] = weight @ x[i]` for active rows, `x[slot of row i]` with GATHER."""
    project(rows, x, weight, out, GATHER)
