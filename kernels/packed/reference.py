"""Reading weight matrices in torch references."""

from torch import Tensor


def in_rows(weight: Tensor) -> Tensor:
    """A view [bands, 16, columns / 32, 32] of a matrix's blocks [bands, columns / 32, 16, 32]: its rows one after another."""
    return weight.transpose(1, 2)


def pick_rows(weight: Tensor, rows: Tensor, columns: int) -> Tensor:
    """`rows` (int64) of a matrix of `columns` columns, [rows, columns]."""
    return in_rows(weight)[rows // weight.shape[2], rows % weight.shape[2]].flatten(1)[:, :columns]
