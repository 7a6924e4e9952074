"""The trained model as a checkpoint in the public layout, and held-out text to check it by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from looped.model import LoopedModel, Shape
from looped.tokenizer import configuration


def config(shape: Shape) -> dict[str, Any]:
    """`config.json` of a model of this shape."""
    return {
        "architectures": ["OuroForCausalLM"],
        "bos_token_id": 0,
        "early_exit_threshold": 1.0,
        "eos_token_id": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "model_type": "ouro",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": shape.eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "total_ut_steps": shape.loops,
        "vocab_size": shape.vocabulary,
    }


def rounded(model: LoopedModel) -> LoopedModel:
    """A copy of `model` whose float32 weights have the values that the bfloat16 checkpoint will have."""
    copy = LoopedModel(model.shape).to(next(model.parameters()).device)
    copy.load_state_dict({name: t.to(torch.bfloat16).float() for name, t in model.state_dict().items()})
    return copy


def write_checkpoint(folder: Path, model: LoopedModel, tokenizer: bytes) -> None:
    """Write configuration, bfloat16 weights and tokenizer into `folder`. The LM head is the embedding and not repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / "tokenizer.json").write_bytes(tokenizer)
    write_json(folder / "config.json", config(model.shape))
    write_json(folder / "tokenizer_config.json", configuration(model.shape.context))
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})


def write_held_out(path: Path, sequences: Sequence[tuple[str, list[int]]], loss: Mapping[str, list[float]]) -> None:
    """Write named held-out sequences with the mean loss per loop over all their tokens but each one's first, by arithmetic."""
    rows = [{"name": name, "ids": ids} for name, ids in sequences]
    path.write_text(json.dumps({"loss": dict(loss), "sequences": rows}, separators=(",", ":")) + "\n", encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
