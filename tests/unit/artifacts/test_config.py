"""Configurations: what is read, and what is refused by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.config import read_config, stop_ids
from ouro_build.artifacts.errors import CheckpointError, UsageError
from ouro_build.artifacts.presets import PRESETS
from tests.unit.artifacts.checkpoints import golden_config

ABSENT = object()
OURO = {
    **golden_config("mha-bf16"),
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 5632,
    "vocab_size": 49152,
    "max_position_embeddings": 65536,
    "max_window_layers": 24,
    "layer_types": ["full_attention"] * 24,
}


def encoded(changes: dict[str, Any] | None = None) -> bytes:
    values = {**golden_config("gqa-fp32"), **(changes or {})}
    return json.dumps({k: v for k, v in values.items() if v is not ABSENT}).encode()


def test_the_published_configuration_is_the_preset() -> None:
    assert read_config(json.dumps(OURO).encode()) == PRESETS["ouro-1.4b"].model


def test_grouped_heads_and_theta() -> None:
    model = read_config(encoded())
    assert (model.heads, model.kv_heads, model.head_dim, model.loops, model.layers) == (6, 2, 16, 3, 3)
    assert (model.theta, model.eps, model.dtype) == (1e4, 1e-6, "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"torch_dtype": ABSENT, "dtype": "float32"},
        {"dtype": "float32"},
        {"rope_scaling": {"rope_type": "default"}},
        {"head_dim": ABSENT},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"attention_bias": False, "quantization_config": None, "something_new": [1, 2]},
        {"early_exit_threshold": 0.5},
        {"layer_types": ABSENT, "tie_word_embeddings": ABSENT},
    ],
)
def test_other_spellings_mean_the_same(changes: dict[str, Any]) -> None:
    assert read_config(encoded(changes)) == read_config(encoded())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("model_type", ABSENT),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear"}),
        ("rope_parameters", {"rope_theta": 1e6}),
        ("rope_parameters", [1]),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("quantization_config", {"quant_method": "awq"}),
        ("torch_dtype", "float16"),
        ("torch_dtype", ABSENT),
        ("dtype", "bfloat16"),
        ("head_dim", 48),
        ("num_key_value_heads", 4),
        ("num_attention_heads", 0),
        ("num_hidden_layers", True),
        ("hidden_size", 96.0),
        ("hidden_size", "96"),
        ("vocab_size", -1),
        ("vocab_size", 1 << 40),
        ("intermediate_size", ABSENT),
        ("total_ut_steps", None),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("tie_word_embeddings", 1),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(key: str, value: object) -> None:
    changes: dict[str, Any] = {key: value}
    if key == "sliding_window":
        changes["use_sliding_window"] = ABSENT
    with pytest.raises(CheckpointError) as caught:
        read_config(encoded(changes), "some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    named = {"num_key_value_heads": "num_key_value_heads is 4", "rope_parameters": "rope_", "torch_dtype": "dtype"}
    assert named.get(key, key) in message
    assert value is ABSENT or "missing" in message or repr(value) in message or key in ("rope_parameters", "dtype")


def test_without_head_dim_the_hidden_size_decides() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size is 100.*multiple of num_attention_heads \(6\)"):
        read_config(encoded({"head_dim": ABSENT, "hidden_size": 100}))
    with pytest.raises(CheckpointError, match=r"hidden_size is 60.*heads of 10"):
        read_config(encoded({"head_dim": ABSENT, "hidden_size": 60}))


def test_dtype_override() -> None:
    assert read_config(encoded(), dtype="bfloat16").dtype == "bfloat16"
    assert read_config(encoded({"torch_dtype": "float16"}), dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(UsageError, match=r"--dtype: weights cannot be 'float16'"):
        read_config(encoded(), dtype="float16")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000, b"1" * 5000])
def test_not_an_object(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^here: "):
        read_config(raw, "here")


@given(st.sampled_from(sorted(golden_config("gqa-fp32"))), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
))  # fmt: skip
def test_any_value_is_read_or_refused(key: str, value: object) -> None:
    with contextlib.suppress(CheckpointError):
        assert read_config(encoded({key: value})).layers > 0


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 7, 5]}, (5, 7)),
        ({"eos_token_id": [2, 0]}, {"eos_token_id": None}, (2, 0)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({}, None, ()),
    ],
)
def test_stop_ids(config: object, generation: object, expected: tuple[int, ...]) -> None:
    raw = None if generation is None else json.dumps(generation).encode()
    assert stop_ids(json.dumps(config).encode(), raw) == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [1, None], {}])
def test_bad_stop_ids(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id"):
        stop_ids(b"{}", json.dumps({"eos_token_id": value}).encode())
