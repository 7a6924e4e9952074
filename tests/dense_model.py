"""The looped model written plainly: whole sequences, no cache, no paging, one request. The tests' own truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_build.artifacts.model import ModelConfig


@dataclass(frozen=True)
class Outputs:
    """Per loop: hidden [loops, tokens, hidden], gate logits and exit pdf [loops, tokens], logits [loops, tokens, vocab]."""

    hidden: Tensor
    gate_logit: Tensor
    exit_pdf: Tensor
    logits: Tensor


class DenseModel:
    """`weights` by checkpoint name; computes in `dtype`."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._c = config
        self._w = {name: t.to(dtype) for name, t in weights.items()}

    def forward(self, ids: Sequence[int]) -> Outputs:
        """Every loop over the whole sequence."""
        c, w = self._c, self._w
        h = w["model.embed_tokens.weight"][torch.tensor(ids)]
        hidden, gates = [], []
        for _ in range(c.loops):
            for layer in range(c.layers):
                h = self._layer(h, f"model.layers.{layer}.")
            h = self.finish(h)
            hidden.append(h)
            gates.append((h @ w["model.early_exit_gate.weight"].T + w["model.early_exit_gate.bias"]).squeeze(-1))
        gate_logit = torch.stack(gates).float()
        return Outputs(torch.stack(hidden), gate_logit, exit_pdf(gate_logit), torch.stack([self.head(x) for x in hidden]))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens at full depth."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.forward(ids).logits[-1, -1].argmax()))
        return ids[len(prompt) :]

    def embed(self, token: int) -> Tensor:
        """The hidden state [1, hidden] that a token starts with."""
        return self._w["model.embed_tokens.weight"][[token]]

    def step(self, h: Tensor, position: int, layer: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One layer for one token; its rotated keys and its values [kv_heads, 1, head_dim] are appended to `cache`."""
        at = f"model.layers.{layer}."
        q, k, v = self._project(self._norm(h, at + "input_layernorm"), at + "self_attn.", position)
        cache.append((k, v))
        keys, values = (torch.cat(t, 1) for t in zip(*cache, strict=True))
        return self._after_attention(h, self._attend(q, keys, values, torch.zeros(1, keys.shape[1])), at)

    def finish(self, h: Tensor) -> Tensor:
        """The norm after every loop."""
        return self._norm(h, "model.norm")

    def head(self, h: Tensor) -> Tensor:
        """Logits [tokens, vocab]."""
        return (h @ self._w["model.embed_tokens.weight" if self._c.tied_embeddings else "lm_head.weight"].T).float()

    def _layer(self, h: Tensor, at: str) -> Tensor:
        q, k, v = self._project(self._norm(h, at + "input_layernorm"), at + "self_attn.", 0)
        causal = torch.full((len(h), len(h)), -torch.inf).triu(1)
        return self._after_attention(h, self._attend(q, k, v, causal), at)

    def _after_attention(self, h: Tensor, attended: Tensor, at: str) -> Tensor:
        a = attended @ self._w[at + "self_attn.o_proj.weight"].T
        h = h + self._norm(a, at + "input_layernorm_2")
        x = self._norm(h, at + "post_attention_layernorm")
        gate = torch.nn.functional.silu(x @ self._w[at + "mlp.gate_proj.weight"].T)
        f = (gate * (x @ self._w[at + "mlp.up_proj.weight"].T)) @ self._w[at + "mlp.down_proj.weight"].T
        return h + self._norm(f, at + "post_attention_layernorm_2")

    def _project(self, x: Tensor, at: str, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [heads, tokens, head_dim]; the first token is at `position`."""
        c = self._c
        q, k, v = (
            (x @ self._w[f"{at}{name}_proj.weight"].T).view(len(x), heads, c.head_dim).transpose(0, 1)
            for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )
        return self._rotate(q, position), self._rotate(k, position), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        group = self._c.heads // self._c.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores: Tensor = (q @ k.transpose(1, 2)).float() * self._c.head_dim**-0.5 + mask
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1).reshape(q.shape[1], -1)

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = self._c.head_dim // 2
        frequency = self._c.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = (position + torch.arange(x.shape[1], dtype=torch.float32))[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self._c.eps)
        return y.to(x.dtype) * self._w[name + ".weight"]


def exit_pdf(gate_logit: Tensor) -> Tensor:
    """p_u = lambda_u * prod_{j<u}(1 - lambda_j); the last loop takes the remainder."""
    stop = gate_logit.sigmoid()
    left = torch.cumprod(1 - stop, 0)
    before = torch.cat([torch.ones_like(left[:1]), left[:-1]])
    return torch.cat([stop[:-1] * before[:-1], before[-1:]])
