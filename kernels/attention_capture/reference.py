"""Torch reference of `attention_capture`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.attention_decode.reference import attention_decode, scores_and_values
from ouro_build.kernels.rows import active


def attention_capture(
    rows: Tensor,
    q: Tensor,
    block_tables: Tensor,
    kv: Tensor,
    partial: Tensor,
    sums: Tensor,
    scores: Tensor,
    layer: int,
    scale: float,
    LAYERS: int,
    TILE: int,
) -> None:
    """The splits of `attention_decode`, and the scores of every active row."""
    attention_decode(rows, q, block_tables, kv, partial, sums, layer, scale, LAYERS, TILE)
    for row in active(rows)[0].tolist():
        found, _ = scores_and_values(rows[row], q[row], block_tables, kv, layer, scale, LAYERS)
        scores[row, :, : int(rows[row, Row.POSITION]) + 1] = found.nan_to_num(float("-inf"), float("inf"), float("-inf"))
