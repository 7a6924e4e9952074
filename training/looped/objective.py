"""What is minimised: every loop's loss, weighted by the exit distribution that the gate learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from looped.model import LoopedModel, exit_distribution


@dataclass(frozen=True)
class Objective:
    """A token's loss is `sum_u w_u L_u + entropy * KL(p || prior)`.

    p is the exit distribution, L_u the cross entropy after loop u, and w = (1 - floor) p + floor * prior. The divergence
    (negative entropy and the prior's cross entropy) keeps the gate from settling on one depth before the loops differ; the
    floor keeps shallow loops usable as drafts where the gate sends few tokens to them. The prior leans to the deepest loop:
    with equal weights the loops after the second learn to change nothing, since what they could add the second is made to
    add already (seen: 2.433 nats after loop 2 and 2.436 after loop 4).
    """

    entropy: float = 0.1
    floor: float = 0.2
    prior: tuple[float, ...] = (0.1, 0.2, 0.25, 0.45)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats [loops, batch, tokens], float32, of `targets` [batch, tokens] under `logits` [loops, batch, tokens, vocabulary]."""
    wanted = targets.expand(logits.shape[:-1])
    nats = functional.cross_entropy(logits.float().flatten(0, -2), wanted.reshape(-1), reduction="none")
    return nats.view(wanted.shape)


def objective(
    model: LoopedModel, tokens: Tensor, targets: Tensor, dtype: torch.dtype, how: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss to minimise, and for the log the mean cross entropy and exit probability of each loop, [loops]."""
    hidden, gates = model(tokens, dtype)
    nats, p = cross_entropy(model.logits(hidden), targets), exit_distribution(gates)
    prior = torch.tensor(how.prior, device=p.device)[:, None, None]
    weights = (1 - how.floor) * p + how.floor * prior
    divergence = (p * (p.clamp_min(1e-9).log() - prior.log())).sum(0)
    loss = (weights * nats).sum(0) + how.entropy * divergence
    return loss.mean(), nats.detach().mean((1, 2)), p.detach().mean((1, 2))
