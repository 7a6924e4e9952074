"""The packed weights: which tensors, in which order, where in the weights pool, and made of what.

One layout serves every GPU. Tensors stand in the order in which a model runs them; the query, key and value projections
of a layer are one tensor, and so are its gate and up projections, so that a program reads each with one launch. Matrices are
stored in blocks: see `blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.blocks import BLOCK_ROWS, blocked_shape, to_blocks
from ouro_build.artifacts.convert import convert
from ouro_build.artifacts.dtypes import nbytes
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Pool

LAYOUT = "blocks_16x32/1"
"""Name of this order of tensors and elements: raised when either changes."""
ALIGNMENT = 256
"""Every packed tensor begins at a multiple of this many bytes."""
INV_FREQ = "inv_freq"
"""The rotary frequencies: computed, not read from a checkpoint."""


class SourceTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


class PackedTensor(msgspec.Struct, frozen=True):
    """A tensor of the weights pool at `offset` bytes: its sources' elements one after another, converted to `dtype`.

    `shape` is that in which it is stored. Of one that is stored in blocks, `matrix` is (rows, columns) as its layer means them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    sources: tuple[SourceTensor, ...]
    matrix: tuple[int, int] | None = None

    @property
    def elements(self) -> int:
        """Its number of stored elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its bytes."""
        return nbytes(self.dtype, self.shape)

    @property
    def band(self) -> int:
        """Stored elements that are made from the same elements of its sources: ranges of whole bands cost nothing extra."""
        return math.prod(self.shape[1:]) if self.matrix else 1


class WeightSource(Protocol):
    """Where packed weights come from: a checkpoint, a preset, a packed file. `read` may be called from several threads."""

    label: str
    """What it is, for messages: a path, or `preset:NAME`."""

    def read(self, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
        """Stored elements [start, stop) of a tensor with sources, in one dimension, in the storage of `tensor.dtype`."""


def weight_layout(model: ModelConfig) -> tuple[PackedTensor, ...]:
    """The packed tensors of `model` in load order, placed."""
    placed: list[PackedTensor] = []
    at = 0
    for name, dtype, shape, sources in _tensors(model):
        if len(shape) == 2:
            rows, columns = shape
            placed.append(PackedTensor(name, dtype, blocked_shape(rows, columns), at, sources, (rows, columns)))
        else:
            placed.append(PackedTensor(name, dtype, shape, at, sources))
        at = _aligned(at + placed[-1].bytes)
    return tuple(placed)


def pool_bytes(model: ModelConfig) -> int:
    """Bytes of the weights pool."""
    last = weight_layout(model)[-1]
    return _aligned(last.offset + last.bytes)


def weight_buffers(model: ModelConfig) -> dict[str, Buffer]:
    """The packed tensors as buffers of the weights pool, by name. With tied embeddings `lm_head` is the embedding."""
    buffers = {t.name: Buffer(t.name, Pool.WEIGHTS, t.dtype, t.shape, t.offset) for t in weight_layout(model)}
    buffers.setdefault("lm_head", buffers["embedding"])
    return buffers


def checkpoint_tensors(model: ModelConfig) -> tuple[SourceTensor, ...]:
    """Every tensor that a checkpoint of `model` must have, in load order."""
    return tuple(source for tensor in weight_layout(model) for source in tensor.sources)


def inv_freq(model: ModelConfig) -> NDArray[np.float32]:
    """Rotary frequencies theta^(-2k / head_dim), float32 [head_dim / 2]; computed in float64 and rounded once."""
    powers = [math.pow(model.theta, -2 * k / model.head_dim) for k in range(model.head_dim // 2)]
    return np.array(powers, "<f4")


Elements = Callable[[str, int, int], tuple[NDArray[np.generic], str]]
"""(checkpoint tensor, start, stop) to those elements in one dimension, and the dtype they are stored in."""


def read_fused(elements: Elements, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
    """`WeightSource.read` from checkpoint tensors: [start, stop) of what their concatenation is stored as, converted."""
    if tensor.matrix is None:
        return _concatenated(elements, tensor, start, stop)
    rows, columns = tensor.matrix
    band = tensor.band
    first, last = start // band, -(-stop // band)
    values = _concatenated(elements, tensor, first * BLOCK_ROWS * columns, min(last * BLOCK_ROWS, rows) * columns)
    return to_blocks(values.reshape(-1, columns))[start - first * band : stop - first * band]


def _concatenated(elements: Elements, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
    """Elements [start, stop) of the sources one after another, converted."""
    parts = []
    first = 0
    for source in tensor.sources:
        a, b = max(start - first, 0), min(stop - first, source.elements)
        if a < b:
            values, stored = elements(source.name, a, b)
            parts.append(convert(values, stored, tensor.dtype))
        first += source.elements
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_Declared = tuple[str, str, tuple[int, ...], tuple[SourceTensor, ...]]


def _tensors(model: ModelConfig) -> Iterator[_Declared]:
    """(name, dtype, shape as the model has it, sources) in load order."""
    hidden = model.hidden_size

    def tensor(name: str, shape: tuple[int, ...], *sources: str) -> _Declared:
        return name, model.dtype, shape, tuple(SourceTensor(s, shape) for s in sources)

    yield INV_FREQ, "float32", (model.head_dim // 2,), ()
    yield tensor("embedding", (model.vocab_size, hidden), "model.embed_tokens.weight")
    for layer in range(model.layers):
        yield from _layer(model, layer)
    yield tensor("norm", (hidden,), "model.norm.weight")
    yield "gate", model.dtype, (hidden,), (SourceTensor("model.early_exit_gate.weight", (1, hidden)),)
    yield tensor("gate_bias", (1,), "model.early_exit_gate.bias")
    if not model.tied_embeddings:
        yield tensor("lm_head", (model.vocab_size, hidden), "lm_head.weight")


def _layer(model: ModelConfig, layer: int) -> Iterator[_Declared]:
    hidden, inner = model.hidden_size, model.intermediate_size

    def rows(name: str, *parts: tuple[str, int], columns: int) -> _Declared:
        """A matrix whose rows are those of `parts`, one after another."""
        sources = tuple(SourceTensor(f"model.layers.{layer}.{part}_proj.weight", (size, columns)) for part, size in parts)
        return f"layers.{layer}.{name}", model.dtype, (sum(size for _, size in parts), columns), sources

    def norm(name: str, source: str) -> _Declared:
        tensor = SourceTensor(f"model.layers.{layer}.{source}.weight", (hidden,))
        return f"layers.{layer}.{name}", model.dtype, (hidden,), (tensor,)

    q, kv = model.query_size, model.kv_size
    yield norm("input_norm", "input_layernorm")
    yield rows("qkv", ("self_attn.q", q), ("self_attn.k", kv), ("self_attn.v", kv), columns=hidden)
    yield rows("o", ("self_attn.o", hidden), columns=q)
    yield norm("input_norm_2", "input_layernorm_2")
    yield norm("post_norm", "post_attention_layernorm")
    yield rows("gate_up", ("mlp.gate", inner), ("mlp.up", inner), columns=hidden)
    yield rows("down", ("mlp.down", hidden), columns=inner)
    yield norm("post_norm_2", "post_attention_layernorm_2")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
