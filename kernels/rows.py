"""Reading row records in torch references."""

from torch import Tensor

from ouro_build.artifacts.rows import Row


def active(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the active rows of int32 [bucket, RECORD] records, and their state slots; both int64."""
    live = (rows[:, Row.SLOT] >= 0).nonzero().squeeze(1)
    return live, rows[live, Row.SLOT].long()
