"""Torch reference of `embedding`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.packed.reference import pick_rows
from ouro_build.kernels.rows import active


def embedding(rows: Tensor, weight: Tensor, hidden: Tensor) -> None:
    """`hidden[slot of row i] = weight[token of row i]` for active rows."""
    live, slots = active(rows)
    hidden[slots] = pick_rows(weight, rows[live, Row.TOKEN].long(), hidden.shape[1])
