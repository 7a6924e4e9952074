"""Torch reference of `exit_gate`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active


def exit_gate(
    rows: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    hidden: Tensor,
    row_state: Tensor,
    gate_logits: Tensor,
    exit_probability: Tensor,
) -> None:
    """Gate logit and exit probability of active rows' loops; keep their hidden states and enter the next loop."""
    live, slots = active(rows)
    loops = rows[live, Row.LOOP].long()
    logits = (x[live].float() * weight.float().flatten()).sum(-1) + bias.float()
    column = torch.arange(gate_logits.shape[1], device=rows.device)
    stay = (1 - gate_logits[slots].sigmoid()).where(column < loops[:, None], 1.0)
    remaining = stay.prod(-1)
    last = loops == gate_logits.shape[1] - 1
    gate_logits[slots, loops] = logits
    exit_probability[slots, loops] = remaining.where(last, logits.sigmoid() * remaining)
    hidden[slots] = x[live]
    row_state[slots, Row.LOOP] = (loops + 1).to(row_state.dtype)
