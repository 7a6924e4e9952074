"""Torch reference of `route_rows`."""

from torch import Tensor

from ouro_build.artifacts.rows import Mode, Row


def route_rows(
    rows: Tensor, dense_rows: Tensor, capture_rows: Tensor, sparse_rows: Tensor, SOURCE_LOOP: int, CAPTURES: bool
) -> None:
    """Each list gets the records of its rows, with the mode that they have now, and -1 elsewhere."""
    active, loop, mode = rows[:, Row.SLOT] >= 0, rows[:, Row.LOOP], rows[:, Row.MODE]
    capture = active & (mode == Mode.CAPTURE) & (loop == SOURCE_LOOP) & CAPTURES
    consume = active & ((mode == Mode.CONSUME) | ((mode == Mode.CAPTURE) & (loop > SOURCE_LOOP)))
    now = rows.clone()
    now[:, Row.MODE] = Mode.DENSE
    now[capture, Row.MODE] = Mode.CAPTURE
    now[consume, Row.MODE] = Mode.CONSUME
    for chosen, found in ((active & ~consume, dense_rows), (capture, capture_rows), (capture | consume, sparse_rows)):
        found.fill_(-1)
        found[chosen] = now[chosen]
