"""Torch reference of `attention_retained`: the definition of capture's contribution and of consume's attention."""

from torch import Tensor

from ouro_build.artifacts.rows import Mode, Row
from ouro_build.kernels.attention_decode.reference import one_split, scores_and_values, whole_context
from ouro_build.kernels.references.reference import count_of, with_slot


def attention_retained(
    rows: Tensor,
    q: Tensor | None,
    block_tables: Tensor,
    kv: Tensor,
    scores: Tensor | None,
    reference_records: Tensor,
    reference_keys: Tensor,
    partial: Tensor,
    sums: Tensor,
    layer: int,
    scale: float,
    LAYERS: int,
    TILE: int,
) -> None:
    """Each split's unnormalised share of every row over its retained keys, its maximum score and its sum."""
    slots, _, _, capacity = reference_keys.shape
    splits = partial.shape[2]
    for row, slot in with_slot(rows, slots):
        count = count_of(rows[row], reference_records, layer, capacity)
        if count == 0:
            continue
        keys = reference_keys[slot, layer, :, :count].long()
        found, values = _row(rows[row], row, q, block_tables, kv, scores, layer, scale, LAYERS, partial.shape[1])
        found = found.gather(1, keys)
        values = values.gather(1, keys[:, :, None].expand(-1, -1, values.shape[2]))
        tiles = (count + TILE - 1) // TILE
        span = -(-tiles // splits) * TILE
        for split in range(splits):
            part = slice(split * span, (split + 1) * span)
            one_split(found[:, part], values[:, part], partial[row, :, split], sums[row, :, split])


def _row(
    record: Tensor,
    row: int,
    q: Tensor | None,
    block_tables: Tensor,
    kv: Tensor,
    scores: Tensor | None,
    layer: int,
    scale: float,
    layers: int,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Scores [heads, n] and values [heads, n, head_dim] of all keys of the row."""
    query = kv.new_zeros(heads, kv.shape[-1]) if q is None else q[row]
    computed, values = scores_and_values(whole_context(record), query, block_tables, kv, layer, scale, layers)
    if scores is not None and (q is None or record[Row.MODE] == Mode.CAPTURE):
        computed = scores[row, :, : computed.shape[1]]
    return computed, values
