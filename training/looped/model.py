"""The looped decoder in torch: the same layers run several times, an exit gate and logits after every loop.

Weights are kept in float32; activations have the type of the call, the residual stream too, so that training in
bfloat16 rounds where inference will.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The model's geometry. The embedding is the LM head too."""

    vocabulary: int = 4096
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 2
    heads: int = 4
    head_dim: int = 64
    loops: int = 4
    context: int = 1024
    rope_theta: float = 10_000.0
    eps: float = 1e-6


class Norm(nn.Module):
    """RMSNorm in float32, cast back, then times the weight."""

    def __init__(self, size: int, eps: float, initial: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), initial))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., size], normalised over its last axis."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self._eps)
        return y.to(x.dtype) * self.weight.to(x.dtype)


class Linear(nn.Linear):
    """A product with the weights cast to the activations' type."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] times the weights [out, in], plus the bias where there is one."""
        return functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Attention(nn.Module):
    """Causal attention with rotated queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self._heads = (shape.heads, shape.head_dim)
        self.q_proj, self.k_proj, self.v_proj = (Linear(shape.hidden, width, bias=False) for _ in range(3))
        self.o_proj = Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`x` [batch, tokens, hidden] attended over itself."""
        q, k, v = (p(x).unflatten(-1, self._heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        o = functional.scaled_dot_product_attention(rotate(q, *rotation), rotate(k, *rotation), v, is_causal=True)
        out: Tensor = self.o_proj(o.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., hidden] to [..., hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each between two norms: one of what it reads, one of what it adds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.input_layernorm_2 = Norm(shape.hidden, shape.eps, ADDED)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm_2 = Norm(shape.hidden, shape.eps, ADDED)

    def forward(self, h: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream `h` [batch, tokens, hidden] after this layer."""
        h = h + self.input_layernorm_2(self.self_attn(self.input_layernorm(h), rotation))
        out: Tensor = h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))
        return out


GATE = -1.7
"""The gate's bias at first: each loop stops about one in six of the tokens that reach it, and the last takes the rest."""
ADDED = 0.3
"""What a branch's own norm lets it add at first, against a stream that every loop's final norm brings back to 1."""


class Decoder(nn.Module):
    """The layers, with the names that the published checkpoints use below `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.early_exit_gate = Linear(shape.hidden, 1)


class LoopedModel(nn.Module):
    """A looped language model; its state dict has the published tensor names, without the tied LM head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.01 if name.endswith("early_exit_gate.weight") else weight.shape[1] ** -0.5)
        nn.init.constant_(self.model.early_exit_gate.bias, GATE)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Hidden states [loops, batch, tokens, hidden] in `dtype` and gate logits [loops, batch, tokens] in float32.

        `tokens` is [batch, tokens], integers.
        """
        h = self.model.embed_tokens.weight.to(dtype)[tokens]
        rotation = rotations(tokens.shape[1], self.shape, tokens.device, dtype)
        states, gates = [], []
        for _ in range(self.shape.loops):
            for layer in self.model.layers:
                h = layer(h, rotation)
            h = self.model.norm(h)
            states.append(h)
            gates.append(self.model.early_exit_gate(h).squeeze(-1).float())
        return torch.stack(states), torch.stack(gates)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden], in their type."""
        return functional.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))


def rotations(tokens: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, head_dim / 2] of the rotary angles, computed in float32."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angle = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., tokens, head_dim] with its two halves rotated against each other."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def exit_distribution(gate_logits: Tensor) -> Tensor:
    """Probability of stopping after each loop, [loops, ...], from gate logits of that shape; the last loop takes the rest."""
    stay = functional.logsigmoid(-gate_logits)
    reached = torch.cat([torch.zeros_like(stay[:1]), stay[:-1].cumsum(0)])
    return torch.cat([functional.logsigmoid(gate_logits[:-1]) + reached[:-1], reached[-1:]]).exp()
