"""What the same step takes in torch: the yardstick of `ouro-worker bench`. Imports torch.

Linear layers by cuBLAS and scaled_dot_product_attention over a plain preallocated cache, projections fused as here; eager, and
as one CUDA graph of the same step. No part of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import INV_FREQ, weight_layout
from ouro_build.runtime.timing import measure, median_ms

_STD = 0.02


class BaselineTimes(NamedTuple):
    """Milliseconds a step, eager and by CUDA graph."""

    eager_ms: float
    graph_ms: float


class TorchDecoder:
    """One decode step of `rows` rows that have `context` tokens each, the one being decoded included.

    `weights` by the names of the packing, its matrices [N, K]. `cache` [2, planes, rows, kv_heads, context, head_dim] holds
    keys, then values; `tokens` int64 [rows] are the inputs, and what the step leaves there is what it chose.
    """

    def __init__(self, model: ModelConfig, weights: Mapping[str, Tensor], cache: Tensor, tokens: Tensor) -> None:
        self._m, self._w = model, weights
        self.cache, self.tokens = cache, tokens
        context = cache.shape[4]
        self._position = torch.tensor([context - 1], device=cache.device)
        angles = (context - 1) * weights[INV_FREQ].float()
        self._cos, self._sin = (torch.cat((t, t)).to(cache.dtype) for t in (angles.cos(), angles.sin()))
        self._head = weights["embedding" if model.tied_embeddings else "lm_head"]

    def step(self) -> Tensor:
        """Run the step; logits [rows, vocab]."""
        m, w = self._m, self._w
        hidden = functional.embedding(self.tokens, w["embedding"])
        for loop in range(m.loops):
            for layer in range(m.layers):
                hidden = self._layer(hidden, loop * m.layers + layer, f"layers.{layer}.")
            hidden = self._norm(hidden, "norm")
            functional.linear(
                hidden, w["gate"].view(1, -1), w["gate_bias"]
            )  # the exit gate: part of the work, its answer unused
        logits = functional.linear(hidden, self._head)
        self.tokens.copy_(logits.argmax(-1))
        return logits

    def _layer(self, hidden: Tensor, plane: int, at: str) -> Tensor:
        w = self._w
        attended = self._attention(self._norm(hidden, at + "input_norm"), plane, w[at + "qkv"])
        hidden = hidden + self._norm(functional.linear(attended, w[at + "o"]), at + "input_norm_2")
        gate, up = functional.linear(self._norm(hidden, at + "post_norm"), w[at + "gate_up"]).chunk(2, -1)
        return hidden + self._norm(functional.linear(functional.silu(gate) * up, w[at + "down"]), at + "post_norm_2")

    def _attention(self, x: Tensor, plane: int, weight: Tensor) -> Tensor:
        m = self._m
        qkv = functional.linear(x, weight).view(len(x), -1, 1, m.head_dim)
        q, k, v = qkv[:, : m.heads], qkv[:, m.heads : m.heads + m.kv_heads], qkv[:, m.heads + m.kv_heads :]
        keys, values = self.cache[0, plane], self.cache[1, plane]
        keys.index_copy_(2, self._position, self._rotate(k))
        values.index_copy_(2, self._position, v)
        grouped = m.heads != m.kv_heads
        return functional.scaled_dot_product_attention(self._rotate(q), keys, values, enable_gqa=grouped).reshape(len(x), -1)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self._cos + torch.cat((-second, first), -1) * self._sin

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self._w[name], self._m.eps)


def random_weights(model: ModelConfig, device: str) -> dict[str, Tensor]:
    """Weights of the packing's names and types, its matrices [N, K], of no meaning: a step takes as long with any."""
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for tensor in weight_layout(model):
        values = torch.empty(tensor.matrix or tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
        made[tensor.name] = values.normal_(0, _STD, generator=generator)
    return made


@torch.inference_mode()
def time_decode(model: ModelConfig, rows: int, context: int, device: int) -> BaselineTimes:
    """Time a decode step on CUDA device `device`, whose memory must have room for the weights and the cache."""
    with torch.cuda.device(device):
        where = f"cuda:{device}"
        shape = (2, model.planes, rows, model.kv_heads, context, model.head_dim)
        cache = torch.zeros(shape, dtype=getattr(torch, model.dtype), device=where)
        tokens = torch.zeros(rows, dtype=torch.int64, device=where)
        decoder = TorchDecoder(model, random_weights(model, where), cache, tokens)
        eager = median_ms(measure(decoder.step, torch.cuda.synchronize))
        graph = median_ms(measure(captured(decoder.step), torch.cuda.synchronize))
    del decoder, cache
    torch.cuda.empty_cache()
    return BaselineTimes(eager, graph)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Replays `step`, which has run before, as one CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
