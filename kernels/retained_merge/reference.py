"""Torch reference of `retained_merge`: the definition of what consuming gives."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Mode, Row
from ouro_build.kernels.references.reference import count_of
from ouro_build.kernels.rows import active


def retained_merge(
    rows: Tensor,
    partial: Tensor,
    sums: Tensor,
    reference_records: Tensor,
    reference_mass: Tensor,
    reference_output: Tensor,
    reference_contribution: Tensor,
    attended: Tensor | None,
    out: Tensor | None,
    layer: int,
    CAPACITY: int,
) -> None:
    """Store capturing rows' outputs and contributions; give consuming rows O + m * (A - C)."""
    for row in active(rows)[0].tolist():
        captured = attended if out is None or int(rows[row, Row.MODE]) == Mode.CAPTURE else None
        if count_of(rows[row], reference_records, layer, CAPACITY) == 0:
            if out is not None and captured is None:
                out[row] = float("nan")
            continue
        slot = int(rows[row, Row.REFERENCE_SLOT])
        retained = _merged(partial[row], sums[row])
        if captured is not None:
            reference_output[slot, layer] = captured[row].view_as(retained).float()
            reference_contribution[slot, layer] = retained
        elif out is not None:
            correction = reference_mass[slot, layer, :, None] * (retained - reference_contribution[slot, layer])
            out[row] = (reference_output[slot, layer] + correction).flatten().to(out.dtype)


def _merged(partial: Tensor, sums: Tensor) -> Tensor:
    """partial [heads, splits, head_dim], sums [heads, splits, 2] -> [heads, head_dim]."""
    maximum, total = sums.unbind(-1)
    parts = torch.where(total[..., None] > 0, partial, 0.0)
    share = torch.exp(maximum - maximum.amax(1, keepdim=True))
    return (parts * share[..., None]).sum(1) / (total * share).sum(1)[..., None]
