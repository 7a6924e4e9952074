"""Synthetic weights: from a seed, by integer arithmetic only, the same bytes on every machine.

An element is random bits of a Philox counter-based generator, keyed by (seed, index of the tensor in the checkpoint's
load order), with its exponent set and its other bits masked. So any part of a tensor can be made on its own, on any
thread. All are bfloat16 values; float32 weights are the same values. What these functions give must never change.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import PackedTensor, SourceTensor, checkpoint_tensors, read_fused

_PER_COUNTER = 16  # a counter gives four 64-bit words, each four elements
_EVERY_LANE = 0x0001000100010001  # repeats 16 bits in each quarter of a word
_BIAS = 127
_SIGN_AND_MANTISSA = 0x807F
_LOW_MANTISSA = 0x001F


class Synthetic:
    """Weights of `model` from `seed`, an integer from 0 to 2^64 - 1; a `WeightSource`. Raises UsageError for other seeds."""

    def __init__(self, model: ModelConfig, seed: int, label: str) -> None:
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"seed {seed} is out of range", where="--seed", hint="Choose one from 0 to 2^64 - 1.")
        self.label = label
        self._seed = seed
        self._tensors = {tensor.name: (index, _bits(tensor)) for index, tensor in enumerate(checkpoint_tensors(model))}

    def read(self, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
        return read_fused(self._elements, tensor, start, stop)

    def _elements(self, name: str, start: int, stop: int) -> tuple[NDArray[np.generic], str]:
        index, (keep, exponent) = self._tensors[name]
        first = start // _PER_COUNTER
        key = np.array([self._seed, index], np.uint64)
        words = np.random.Philox(key=key, counter=first).random_raw(-(-stop // 4) - first * (_PER_COUNTER // 4))
        words &= np.uint64(keep * _EVERY_LANE)
        words |= np.uint64(exponent * _EVERY_LANE)
        offset = start - first * _PER_COUNTER
        return words.astype("<u8", copy=False).view("<u2")[offset : offset + stop - start], "bfloat16"


def _bits(tensor: SourceTensor) -> tuple[int, int]:
    """(random bits to keep, exponent bits to set) of a bfloat16, so that activations stay near 1.

    Norms are in [1, 1.25), the embedding's magnitudes in [1/2, 1), the gate's bias's in [1/16, 1/8), all others' about
    1 / sqrt(fan-in): in [2^-6, 2^-5) for 2048 inputs.
    """
    if tensor.name.endswith(".bias"):
        return _SIGN_AND_MANTISSA, _exponent(-4)
    if len(tensor.shape) == 1:
        return _LOW_MANTISSA, _exponent(0)
    if tensor.name == "model.embed_tokens.weight":
        return _SIGN_AND_MANTISSA, _exponent(-1)
    return _SIGN_AND_MANTISSA, _exponent(-(tensor.shape[1].bit_length() // 2))


def _exponent(power: int) -> int:
    return (_BIAS + power) << 7
