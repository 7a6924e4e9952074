"""A checkpoint's `config.json` as a `ModelConfig`; whatever would change the arithmetic is refused by name."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from ouro_build.artifacts.convert import WEIGHT_DTYPES
from ouro_build.artifacts.errors import CheckpointError, UsageError
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.strict_json import parse_object

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
HEAD_DIMS = (16, 32, 64, 128)
"""Head sizes the attention kernels are written for."""

_LIMIT = 1 << 31
# Keys that change the arithmetic unless they have one of these values, or are absent.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "rope_scaling": (None, {"rope_type": "default"}, {"type": "default"}),
    "partial_rotary_factor": (1.0, None),
}
_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def read_config(raw: bytes, where: str = CONFIG, dtype: str | None = None) -> ModelConfig:
    """The model that `raw`, a `config.json`, describes; `dtype` instead of the checkpoint's where given.

    Keys that do not touch the arithmetic (`auto_map`, `transformers_version`, `early_exit_threshold`, which is a choice of
    the request, …) are ignored. Raises CheckpointError with file, key and value for what is missing, malformed or not
    supported, UsageError for a `dtype` that weights cannot have.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise UsageError(f"weights cannot be {dtype!r}", where="--dtype", hint=f"Choose one of {', '.join(WEIGHT_DTYPES)}.")
    keys = _Keys(parse_object(raw, where), where)
    keys.expect("model_type", ("ouro",))
    keys.expect("hidden_act", ("silu",))
    _refuse_other_arithmetic(keys)
    heads = keys.integer("num_attention_heads")
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer("intermediate_size"),
        layers=keys.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=_kv_heads(keys, heads),
        head_dim=_head_dim(keys, heads),
        loops=keys.integer("total_ut_steps"),
        max_position=keys.integer("max_position_embeddings"),
        rms_norm_eps=keys.positive("rms_norm_eps").hex(),
        rope_theta=_rope_theta(keys).hex(),
        tied_embeddings=keys.flag("tie_word_embeddings"),
        dtype=dtype or _dtype(keys),
    )


def stop_ids(config: bytes, generation: bytes | None) -> tuple[int, ...]:
    """Token ids that end a text: `eos_token_id` of the generation config, else of the config; an integer or a list.

    Empty where neither has one. Raises CheckpointError for other values.
    """
    found = _eos(generation, GENERATION_CONFIG) if generation is not None else ()
    return found or _eos(config, CONFIG)


def _eos(raw: bytes, where: str) -> tuple[int, ...]:
    value = parse_object(raw, where).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        if type(one) is not int or not 0 <= one < _LIMIT:
            raise CheckpointError(f"eos_token_id is {value!r}, token ids expected", where=where)
    return tuple(dict.fromkeys(ids))


class _Keys:
    """Typed reading of an object of a checkpoint's configuration, with errors that name file, key and value."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def get(self, key: str) -> Any:
        """The value of `key`; None where it is absent or null."""
        return self._values.get(key)

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise CheckpointError for the value of `key`."""
        found = f"is {self._values[key]!r}" if key in self._values else "is missing"
        raise CheckpointError(f"{key} {found}; {expected}", where=self.where)

    def expect(self, key: str, allowed: tuple[object, ...]) -> None:
        """Refuse the value of `key` unless it is one of `allowed`."""
        if self.get(key) not in allowed:
            self.refuse(key, f"only {' or '.join(repr(a) for a in allowed)} is supported")

    def integer(self, key: str) -> int:
        """A size: an integer from 1 to 2^31 - 1."""
        value = self.get(key)
        if type(value) is not int or not 1 <= value < _LIMIT:
            self.refuse(key, "an integer of at least 1 is expected")
        return value

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.get(key)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self.refuse(key, "a number above 0 is expected")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; false where absent."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            self.refuse(key, "true or false is expected")
        return bool(value)


def _refuse_other_arithmetic(keys: _Keys) -> None:
    for key, allowed in _NEUTRAL.items():
        keys.expect(key, allowed)
    # `sliding_window` alone does nothing where `use_sliding_window` says no.
    if keys.get("sliding_window") is not None and keys.get("use_sliding_window") is not False:
        keys.refuse("sliding_window", "sliding windows are not supported")
    if keys.flag("use_sliding_window"):
        keys.refuse("use_sliding_window", "sliding windows are not supported")
    kinds = keys.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        keys.refuse("layer_types", "only 'full_attention' is supported")


def _kv_heads(keys: _Keys, heads: int) -> int:
    kv_heads = heads if keys.get("num_key_value_heads") is None else keys.integer("num_key_value_heads")
    if heads % kv_heads:
        keys.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads}) is expected")
    return kv_heads


def _head_dim(keys: _Keys, heads: int) -> int:
    if keys.get("head_dim") is None:
        hidden = keys.integer("hidden_size")
        if hidden % heads:
            keys.refuse("hidden_size", f"without head_dim, a multiple of num_attention_heads ({heads}) is expected")
        if hidden // heads not in HEAD_DIMS:
            keys.refuse("hidden_size", f"that makes heads of {hidden // heads}, and {_one_of(HEAD_DIMS)} are supported")
        return hidden // heads
    size = keys.integer("head_dim")
    if size not in HEAD_DIMS:
        keys.refuse("head_dim", f"{_one_of(HEAD_DIMS)} are supported")
    return size


def _rope_theta(keys: _Keys) -> float:
    """`rope_theta`, or newer configurations' `rope_parameters.rope_theta`; where both are given they must agree."""
    parameters = keys.get("rope_parameters")
    if parameters is None:
        return keys.positive("rope_theta")
    if not isinstance(parameters, dict) or any(key not in _ROPE_KEYS for key in parameters):
        keys.refuse("rope_parameters", f"an object of {_one_of(_ROPE_KEYS)} is expected: rope scaling is not supported")
    inner = _Keys(parameters, f"{keys.where}: rope_parameters")
    for key in ("rope_type", "type"):
        inner.expect(key, ("default", None))
    inner.expect("partial_rotary_factor", (1.0, None))
    if inner.get("rope_theta") is None:
        return keys.positive("rope_theta")
    theta = inner.positive("rope_theta")
    if keys.get("rope_theta") is not None and keys.positive("rope_theta") != theta:
        keys.refuse("rope_theta", f"rope_parameters says {theta!r}")
    return theta


def _dtype(keys: _Keys) -> str:
    """`dtype`, or the older `torch_dtype`; where both are given they must agree."""
    given = [key for key in ("dtype", "torch_dtype") if keys.get(key) is not None]
    if not given:
        keys.refuse("dtype", f"{_one_of(WEIGHT_DTYPES)} are supported")
    for key in given:
        if keys.get(key) not in WEIGHT_DTYPES:
            keys.refuse(key, f"{_one_of(WEIGHT_DTYPES)} are supported")
        if keys.get(key) != keys.get(given[0]):
            keys.refuse(key, f"{given[0]} says {keys.get(given[0])!r}")
    name: str = keys.get(given[0])
    return name


def _one_of(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)
