"""Sparse attention of whole rows, in torch: what a mode means, for the modes that an artifact has no plan of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_build.artifacts.rows import SOURCE_LOOP, Mode, ReferenceRecord, Row
from ouro_build.kernels.attention_decode.reference import scores_and_values, whole_context
from ouro_build.kernels.attention_select.reference import retained_keys
from ouro_build.kernels.references.reference import count_of
from ouro_build.kernels.rows import active


@dataclass(frozen=True)
class References:
    """The buffers of the pool `references`: retained_counts int32 [max_context + 1], the others by slot, layer and head."""

    retained_counts: Tensor
    reference_records: Tensor
    reference_mass: Tensor
    reference_keys: Tensor
    reference_output: Tensor
    reference_contribution: Tensor


def sparse_attention(
    mode: str,
    captures: bool,
    references: References,
    rows: Tensor,
    q: Tensor,
    block_tables: Tensor,
    kv: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    LAYERS: int,
) -> None:
    """Attention output of every active row in a program of `mode`: `dense`, `capture`, `consume`, or `mixed`.

    With `mixed` each row's own mode and loop decide; rows capture there only with `captures`. A row that consumes what is not
    there gives NaN, one that captures without a slot stores nothing.
    """
    for row in active(rows)[0].tolist():
        record = rows[row]
        role = _role(mode, captures, record)
        scores, values = scores_and_values(whole_context(record), q[row], block_tables, kv, layer, scale, LAYERS)
        if role is Mode.CONSUME:
            out[row] = _consumed(references, record, scores, values, layer).flatten().to(out.dtype)
            continue
        weights = scores.softmax(1)
        out[row] = torch.einsum("hp,hpd->hd", weights, values).flatten().to(out.dtype)
        slot = int(record[Row.REFERENCE_SLOT])
        if role is Mode.CAPTURE and 0 <= slot < len(references.reference_records):
            _capture(references, record, slot, scores, weights, values, out[row], layer)


def _role(mode: str, captures: bool, record: Tensor) -> Mode:
    if mode != "mixed":
        return Mode[mode.upper()]
    own, loop = int(record[Row.MODE]), int(record[Row.LOOP])
    if own == Mode.CONSUME or (own == Mode.CAPTURE and loop > SOURCE_LOOP):
        return Mode.CONSUME
    return Mode.CAPTURE if captures and own == Mode.CAPTURE and loop == SOURCE_LOOP else Mode.DENSE


def _capture(
    r: References, record: Tensor, slot: int, scores: Tensor, weights: Tensor, values: Tensor, out: Tensor, layer: int
) -> None:
    count = int(r.retained_counts[scores.shape[1]])
    keys = retained_keys(scores, count)
    mass = weights.gather(1, keys).sum(1)
    r.reference_keys[slot, layer, :, :count] = keys.int()
    r.reference_mass[slot, layer] = mass
    r.reference_output[slot, layer] = out.float().view_as(r.reference_output[slot, layer])
    r.reference_contribution[slot, layer] = _retained(keys, scores, values)
    r.reference_records[slot, layer, ReferenceRecord.GENERATION] = record[Row.GENERATION]
    r.reference_records[slot, layer, ReferenceRecord.COUNT] = count


def _consumed(r: References, record: Tensor, scores: Tensor, values: Tensor, layer: int) -> Tensor:
    """O + m * (A - C), float32 [heads, head_dim]."""
    count = count_of(record, r.reference_records, layer, r.reference_keys.shape[3])
    if count == 0:
        return values.new_full((values.shape[0], values.shape[2]), float("nan"))
    slot = int(record[Row.REFERENCE_SLOT])
    attended = _retained(r.reference_keys[slot, layer, :, :count].long(), scores, values)
    correction = r.reference_mass[slot, layer, :, None] * (attended - r.reference_contribution[slot, layer])
    return r.reference_output[slot, layer] + correction


def _retained(keys: Tensor, scores: Tensor, values: Tensor) -> Tensor:
    """Attention over `keys` [heads, count] alone, float32 [heads, head_dim]."""
    kept = values.gather(1, keys[:, :, None].expand(-1, -1, values.shape[2]))
    return torch.einsum("hp,hpd->hd", scores.gather(1, keys).softmax(1), kept)
