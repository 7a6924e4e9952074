"""Synthetic weights: the same bytes everywhere and in every piece, and of a usable size."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ouro_build.artifacts.convert import convert
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.packing import PackedTensor, weight_layout
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.synthetic import Synthetic
from tests.unit.artifacts.blocks import logical

TINY = PRESETS["tiny"].model
LARGE = PRESETS["ouro-1.4b"].model


def packed(model: object = TINY) -> dict[str, PackedTensor]:
    return {t.name: t for t in weight_layout(model)}  # type: ignore[arg-type]


def whole(source: Synthetic, tensor: PackedTensor) -> NDArray[np.generic]:
    """All elements, in the order in which they are stored."""
    return source.read(tensor, 0, tensor.elements)


@pytest.mark.parametrize(
    ("model", "seed", "name", "sha256"),
    [
        ("tiny", 0, "embedding", "4d8e1ef37f5e2e33cd308c46b0752fb86e7b073c269fd9fce25e9dbca92ecbca"),
        ("tiny", 0, "layers.1.qkv", "4de1e33f9076ef154b04d5fede26aed438f581e92847b73157009d82b5e83736"),
        ("tiny", 0, "gate_bias", "e98b8e56f9d13381815f596abbf11abb9dcb34dd9fd4e73ade7f316f718fd219"),
        ("tiny", 7, "layers.0.down", "6b99e85d46f2fa963db928d0a1694da97ede93348d4849f8a5fe63c0085401f0"),
        ("ouro-1.4b", 0, "layers.23.post_norm_2", "84345bcfab15d20f7b8cc68b38e32d51b36b1b7ae02537b0f3785959405f6404"),
        ("ouro-1.4b", 0, "layers.11.o", "bc7290e741299ca9382bd525016f498f3412dbe1d1bdac947b4e07c3de518b47"),
    ],
)
def test_bytes_never_change(model: str, seed: int, name: str, sha256: str) -> None:
    config = PRESETS[model].model
    tensor = packed(config)[name]
    values = logical(tensor, whole(Synthetic(config, seed, "x"), tensor))
    assert hashlib.sha256(values.tobytes()).hexdigest() == sha256


def test_the_first_words_are_philoxs() -> None:
    """By hand from the generator: element i is 16 bits of its raw words, masked, with the exponent of 1/8 set."""
    tensor = packed()["layers.0.qkv"]  # the third tensor of a checkpoint: index 2
    words = np.random.Philox(key=np.array([5, 2], np.uint64)).random_raw(2)
    wanted = [(int(word) >> shift & 0x807F) | (127 - 3 << 7) for word in words for shift in (0, 16, 32, 48)]
    assert Synthetic(TINY, 5, "x").read(tensor, 0, 8).tolist() == wanted


@given(st.sampled_from(["embedding", "layers.0.qkv", "layers.1.gate_up", "norm"]), st.data())
def test_any_part_is_the_part_of_the_whole(name: str, data: st.DataObject) -> None:
    tensor = packed()[name]
    start = data.draw(st.integers(0, tensor.elements - 1))
    stop = data.draw(st.integers(start + 1, tensor.elements))
    source = Synthetic(TINY, 3, "x")
    np.testing.assert_array_equal(source.read(tensor, start, stop), whole(source, tensor)[start:stop])


def test_float32_is_the_same_values() -> None:
    for name in ("embedding", "layers.0.qkv", "gate_bias"):
        narrow = whole(Synthetic(TINY, 0, "x"), packed()[name])
        model = PRESETS["tiny"].with_dtype("float32")
        wide = whole(Synthetic(model, 0, "x"), packed(model)[name])
        np.testing.assert_array_equal(wide, convert(narrow, "bfloat16", "float32"))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("embedding", 0.5, 1.0),
        ("layers.0.input_norm", 1.0, 1.25),
        ("norm", 1.0, 1.25),
        ("layers.0.qkv", 2**-6, 2**-5),
        ("layers.0.down", 2**-6, 2**-5),
        ("gate", 2**-6, 2**-5),
        ("gate_bias", 2**-4, 2**-3),
    ],
)
def test_magnitudes(name: str, low: float, high: float) -> None:
    tensor = packed(LARGE)[name]
    bits = Synthetic(LARGE, 0, "x").read(tensor, 0, min(tensor.elements, 1 << 18))
    values = convert(bits, "bfloat16", "float32")
    size = np.abs(values.astype(np.float64))
    assert low <= size.min() <= size.max() < high
    if "norm" in name:
        assert (values.astype(np.float64) > 0).all()
    elif values.size > 1000:
        assert abs(np.sign(values.astype(np.float64)).mean()) < 0.05


def test_seeds_and_tensors_differ() -> None:
    layout = packed()
    assert not np.array_equal(whole(Synthetic(TINY, 0, "x"), layout["norm"]), whole(Synthetic(TINY, 1, "x"), layout["norm"]))
    source = Synthetic(TINY, 0, "x")
    assert not np.array_equal(whole(source, layout["layers.0.o"]), whole(source, layout["layers.1.o"]))


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seeds_out_of_range(seed: int) -> None:
    with pytest.raises(UsageError, match=r"--seed"):
        Synthetic(TINY, seed, "x")
    Synthetic(TINY, (1 << 64) - 1, "x").read(packed()["norm"], 0, 4)
