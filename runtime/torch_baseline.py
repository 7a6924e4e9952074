"""What the same step or prompt takes in torch: the yardstick of `ouro-worker bench`. Imports torch.

Linear layers by cuBLAS and scaled_dot_product_attention over a plain preallocated cache, projections fused as here; eager, and
a step as one CUDA graph too. No part of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
    """Decode steps of `rows` rows that have `context` tokens each, the one being decoded included; or prompts of that length.

    `weights` by the names of the packing, its matrices [N, K]. `cache` [2, planes, rows, kv_heads, context, head_dim] holds
    keys, then values; `tokens` int64 [rows] are the inputs of a step, and what the step leaves there is what it chose.
    """

    def __init__(self, model: ModelConfig, weights: Mapping[str, Tensor], cache: Tensor, tokens: Tensor) -> None:
        self._m, self._w = model, weights
        self.cache, self.tokens = cache, tokens
        angles = torch.arange(cache.shape[4], device=cache.device)[:, None] * weights[INV_FREQ].float()
        self._cos, self._sin = (torch.cat((t, t), -1).to(cache.dtype) for t in (angles.cos(), angles.sin()))
        self._head = weights["embedding" if model.tied_embeddings else "lm_head"]

    def step(self) -> Tensor:
        """Run the step; logits [rows, vocab]."""
        logits = self._logits(self.tokens[:, None])
        self.tokens.copy_(logits.argmax(-1))
        return logits

    def prefill(self, prompts: Tensor) -> Tensor:
        """Fill the cache from `prompts` int64 [rows, context]; logits [rows, vocab] of their last tokens."""
        return self._logits(prompts)

    def _logits(self, tokens: Tensor) -> Tensor:
        """Run `tokens` [rows, new], the last ones of the context: one, or all."""
        m, w = self._m, self._w
        hidden = functional.embedding(tokens, w["embedding"])
        for loop in range(m.loops):
            for layer in range(m.layers):
                hidden = self._layer(hidden, loop * m.layers + layer, f"layers.{layer}.")
            hidden = self._norm(hidden, "norm")
            functional.linear(
                hidden, w["gate"].view(1, -1), w["gate_bias"]
            )  # the exit gate: part of the work, its answer unused
        return functional.linear(hidden[:, -1], self._head)

    def _layer(self, hidden: Tensor, plane: int, at: str) -> Tensor:
        w = self._w
        attended = self._attention(self._norm(hidden, at + "input_norm"), plane, w[at + "qkv"])
        hidden = hidden + self._norm(functional.linear(attended, w[at + "o"]), at + "input_norm_2")
        gate, up = functional.linear(self._norm(hidden, at + "post_norm"), w[at + "gate_up"]).chunk(2, -1)
        return hidden + self._norm(functional.linear(functional.silu(gate) * up, w[at + "down"]), at + "post_norm_2")

    def _attention(self, x: Tensor, plane: int, weight: Tensor) -> Tensor:
        m, (rows, new, _) = self._m, x.shape
        qkv = functional.linear(x, weight).view(rows, new, -1, m.head_dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [m.heads, m.kv_heads, m.kv_heads], 1)
        keys, values = self.cache[:, plane].unbind(0)
        keys[:, :, -new:], values[:, :, -new:] = self._rotate(k), v
        causal, grouped = new > 1, m.heads != m.kv_heads
        out = functional.scaled_dot_product_attention(self._rotate(q), keys, values, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(rows, new, -1)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = (t[-x.shape[2] :] for t in (self._cos, self._sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

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
        decoder = _decoder(model, rows, context, f"cuda:{device}")
        eager = median_ms(measure(decoder.step, torch.cuda.synchronize))
        graph = median_ms(measure(captured(decoder.step), torch.cuda.synchronize))
    del decoder
    torch.cuda.empty_cache()
    return BaselineTimes(eager, graph)


@torch.inference_mode()
def time_prefill(model: ModelConfig, tokens: int, device: int) -> float:
    """Milliseconds, eager, of one prompt's prefill in one piece on CUDA device `device`, with room as for `time_decode`."""
    with torch.cuda.device(device):
        decoder = _decoder(model, 1, tokens, f"cuda:{device}")
        prompt = torch.zeros((1, tokens), dtype=torch.int64, device=decoder.cache.device)
        eager = median_ms(measure(partial(decoder.prefill, prompt), torch.cuda.synchronize))
    del decoder
    torch.cuda.empty_cache()
    return eager


@torch.inference_mode()
def time_read(size: int, device: int) -> float:
    """Seconds in which torch.sum reads `size` bytes of CUDA device `device` once, the least of several batches.

    By a CUDA graph, as the artifact's own program that reads runs; there must be room for the bytes.
    """
    with torch.cuda.device(device):
        read = partial(torch.sum, values_to_read(size, f"cuda:{device}"))
        read()
        seconds = min(measure(captured(read), torch.cuda.synchronize))
    del read
    torch.cuda.empty_cache()
    return seconds


def values_to_read(size: int, device: str) -> Tensor:
    """`size` bytes, a multiple of four, as float32 [size / 4]: as weights are, since reading zeros costs less power."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(size // 4, dtype=torch.float32, device=device).normal_(0, _STD, generator=generator)


def _decoder(model: ModelConfig, rows: int, context: int, where: str) -> TorchDecoder:
    shape = (2, model.planes, rows, model.kv_heads, context, model.head_dim)
    cache = torch.zeros(shape, dtype=getattr(torch, model.dtype), device=where)
    tokens = torch.zeros(rows, dtype=torch.int64, device=where)
    return TorchDecoder(model, random_weights(model, where), cache, tokens)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Replays `step`, which has run before, as one CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
