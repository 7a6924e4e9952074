"""What a trained model is worth: loss per loop, early exits, drafts, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looped.model import LoopedModel, exit_distribution
from looped.objective import cross_entropy

THRESHOLDS = (0.5, 0.7, 0.9)
"""Exit thresholds that are reported."""


@dataclass(frozen=True)
class Exits:
    """Early exit at one threshold: mean depth in loops, mean loss in nats a token, share of tokens by depth."""

    threshold: float
    depth: float
    loss: float
    shares: list[float]


@dataclass(frozen=True)
class Figures:
    """Means over held-out tokens: nats after each loop, exit probability of each, exits, and how often the shallow
    greedy token (index: loops - 1) is the full depth's."""

    tokens: int
    loss: list[float]
    exit_probability: list[float]
    exits: list[Exits]
    agreement: list[float]


@torch.inference_mode()
def evaluate(model: LoopedModel, batches: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Figures:
    """Figures of `model` computing in `dtype`; batches are (inputs, targets), int64 [rows, tokens].

    Exits are taken token by token; every token's keys of all loops are there for the tokens after it.
    """
    device = next(model.parameters()).device
    nats, p, same = [], [], []
    for batch in batches:
        tokens, targets = (t.to(device) for t in batch)
        hidden, gates = model(tokens, dtype)
        logits = model.logits(hidden)
        nats.append(cross_entropy(logits, targets).flatten(1).cpu())
        p.append(exit_distribution(gates).flatten(1).cpu())
        choice = logits.argmax(-1)
        same.append((choice == choice[-1]).flatten(1).cpu())
    loss, probability = torch.cat(nats, 1).double(), torch.cat(p, 1).double()
    return Figures(
        tokens=loss.shape[1],
        loss=loss.mean(1).tolist(),
        exit_probability=probability.mean(1).tolist(),
        exits=[exits(loss, probability, threshold) for threshold in THRESHOLDS],
        agreement=torch.cat(same, 1).double().mean(1).tolist(),
    )


def exits(nats: Tensor, p: Tensor, threshold: float) -> Exits:
    """Exits at `threshold`, from loss and exit probability, [loops, tokens] each."""
    last = len(p) - 1
    index = (p.cumsum(0)[:-1] < threshold).sum(0)  # loops that are not enough; the last one always is
    shares = torch.bincount(index, minlength=last + 1).double() / index.numel()
    return Exits(threshold, index.double().mean().item() + 1, nats.gather(0, index[None]).mean().item(), shares.tolist())


@torch.inference_mode()
def greedy(model: LoopedModel, prompt: Sequence[int], count: int, dtype: torch.dtype, end: int = 0) -> list[int]:
    """Up to `count` tokens after `prompt` at full depth, each the likeliest; fewer where `end` is met."""
    device = next(model.parameters()).device
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        hidden, _ = model(torch.tensor([ids], device=device), dtype)
        ids.append(int(model.logits(hidden[-1, 0, -1]).argmax()))
        if ids[-1] == end:
            break
    return ids[len(prompt) :]
