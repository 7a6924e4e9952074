"""Optimizers and the learning rate's course."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Course:
    """Warm-up, a constant rate, then a linear descent to zero over the last `descent` of the run.

    The end is either a number of steps known from the start, or follows from the time: the descent begins when the
    constant part has used its share of the seconds, and is then as long in steps as that share demands.
    """

    rate: float = 6e-3
    warmup: int = 300
    descent: float = 0.4

    def last_step(self, descent_from: int) -> int:
        """Number of steps of a run whose descent begins at step `descent_from`."""
        return max(descent_from + 1, math.ceil(descent_from / (1 - self.descent)))

    def descent_from(self, steps: int) -> int:
        """The step at which a run of `steps` steps begins its descent."""
        return min(steps - 1, int(steps * (1 - self.descent)))

    def at(self, step: int, descent_from: int | None) -> float:
        """The learning rate of a step; `descent_from` is None while the descent's beginning is still open."""
        rate = self.rate * min(1.0, (step + 1) / self.warmup)
        if descent_from is None or step < descent_from:
            return rate
        last = self.last_step(descent_from)
        return rate * (last - step) / (last - descent_from)


def optimizers(model: nn.Module, rate: float, decay: float = 0.1) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for embedding, gate and norms, the last two without weight decay.

    Muon's steps are scaled to the size of AdamW's, so that both follow one rate.
    """
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    embedding = [p for name, p in named.items() if "embed_tokens" in name]
    rest = [p for name, p in named.items() if p.ndim == 1 or "early_exit_gate" in name]
    fused = next(model.parameters()).is_cuda
    groups: list[dict[str, Any]] = [{"params": embedding}, {"params": rest, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=decay, fused=fused),
    ]
