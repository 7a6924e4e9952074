"""Torch reference of `attention_capture`."""

from torch import Tensor

from ouro_build.kernels.attention_decode.reference import attention_decode, scores_and_values
from ouro_build.kernels.split_contexts import Split


def attention_capture(
    splits: Tensor,
    q: Tensor,
    block_tables: Tensor,
    kv: Tensor,
    partial: Tensor,
    sums: Tensor,
    scores: Tensor,
    layer: int,
    scale: float,
    LAYERS: int,
) -> None:
    """The splits of `attention_decode`, and the scores of every key of theirs."""
    attention_decode(splits, q, block_tables, kv, partial, sums, layer, scale, LAYERS)
    for record in splits[splits[:, Split.ROW] >= 0].tolist():
        row, _, _, first, end, request, loop = record[: Split.LOOP + 1]
        found, _ = scores_and_values((request, loop, first, end), q[row], block_tables, kv, layer, scale, LAYERS)
        scores[row, :, first:end] = found.nan_to_num(float("-inf"), float("inf"), float("-inf"))
