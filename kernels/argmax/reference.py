"""Torch reference of `argmax`."""

from torch import Tensor

from ouro_build.kernels.rows import active


def argmax(rows: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """`tokens[i]` = the lowest index of the largest of `logits[i]` for active rows; NaN is below every number."""
    live, _ = active(rows)
    x = logits[live]
    largest = x.where(~x.isnan(), float("-inf")).amax(-1, keepdim=True)
    # Where all are NaN nothing is equal, and the first of the equal zeros is index 0.
    tokens[live] = (x == largest).int().argmax(-1).to(tokens.dtype)
