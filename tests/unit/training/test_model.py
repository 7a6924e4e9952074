"""The training model computes what the tests' own dense model computes, and learns through its gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from looped.evaluate import evaluate, exits, greedy
from looped.export import rounded, write_checkpoint
from looped.model import LoopedModel, Shape, exit_distribution
from looped.objective import Objective, objective
from safetensors.torch import load_file

from ouro_build.artifacts.config import read_config
from tests.dense_model import DenseModel, exit_pdf

SMALL = Shape(vocabulary=96, hidden=64, intermediate=96, layers=2, heads=3, head_dim=32, loops=4, context=64)


@pytest.fixture
def model() -> LoopedModel:
    torch.manual_seed(0)
    small = LoopedModel(SMALL)
    with torch.no_grad():
        for weight in small.parameters():  # norms off 1 and a gate bias off 0, so that none can be forgotten
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return small


def test_equals_the_dense_model(model: LoopedModel, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model, b"{}")
    config = read_config((tmp_path / "config.json").read_bytes())
    assert config.tied_embeddings
    stored = load_file(tmp_path / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in stored.values())
    tokens = torch.randint(SMALL.vocabulary, (1, 40))
    expected = DenseModel(config, stored).forward(tokens[0].tolist())
    with torch.inference_mode():
        rounded_model = rounded(model)
        hidden, gates = rounded_model(tokens, torch.float32)
        logits = rounded_model.logits(hidden)
    torch.testing.assert_close(hidden[:, 0], expected.hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gates[:, 0], expected.gate_logit, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[:, 0], expected.logits, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(exit_distribution(gates)[:, 0], expected.exit_pdf, atol=1e-6, rtol=1e-5)


def test_greedy_equals_the_dense_model(model: LoopedModel, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, model, b"{}")
    dense = DenseModel(read_config((tmp_path / "config.json").read_bytes()), load_file(tmp_path / "model.safetensors"))
    prompt = [5, 17, 80, 2]
    assert greedy(rounded(model), prompt, 8, torch.float32, end=-1) == dense.greedy(prompt, 8)


def test_tensor_names_are_the_published_ones(model: LoopedModel) -> None:
    names = set(model.state_dict())
    assert len(names) == 11 * SMALL.layers + 4  # the LM head is tied
    assert {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.early_exit_gate.weight",
        "model.early_exit_gate.bias",
    } < names
    assert "model.layers.1.post_attention_layernorm_2.weight" in names


def test_exit_distribution_survives_extreme_gates() -> None:
    gates = torch.tensor([[-200.0, 200.0, 0.3], [0.0, 5.0, -0.2], [200.0, -200.0, 1.0], [9.0, 9.0, 9.0]])
    p = exit_distribution(gates)
    torch.testing.assert_close(p, exit_pdf(gates), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(p.sum(0), torch.ones(3))


def test_objective_is_the_documented_sum(model: LoopedModel) -> None:
    tokens = torch.randint(SMALL.vocabulary, (2, 17))
    how = Objective(entropy=0.3, floor=0.2, prior=(0.1, 0.2, 0.3, 0.4))
    loss, nats, p = objective(model, tokens[:, :-1], tokens[:, 1:], torch.float32, how)
    torch.autograd.backward(loss)
    assert nats.shape == p.shape == (4,)
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())
    hidden, gates = model(tokens[:, :-1], torch.float32)
    each = -model.logits(hidden).log_softmax(-1).gather(-1, tokens[:, 1:].expand(4, 2, 16)[..., None])[..., 0]
    pdf = exit_pdf(gates)
    prior = torch.tensor(how.prior)[:, None, None]
    by_hand = ((0.8 * pdf + 0.2 * prior) * each).sum(0) + 0.3 * (pdf * (pdf / prior).log()).sum(0)
    torch.testing.assert_close(loss, by_hand.mean(), atol=1e-5, rtol=1e-5)


def test_exits_follow_the_threshold_and_the_last_loop_takes_the_rest() -> None:
    p = torch.tensor([[0.6, 0.1], [0.2, 0.1], [0.1, 0.1], [0.1, 0.7]], dtype=torch.float64)
    nats = torch.tensor([[4.0, 8.0], [3.0, 7.0], [2.0, 6.0], [1.0, 5.0]], dtype=torch.float64)
    at_half, at_most = exits(nats, p, 0.5), exits(nats, p, 0.75)
    assert (at_half.depth, at_half.loss) == (2.5, 4.5)
    assert (at_most.depth, at_most.loss) == (3.0, 4.0)
    assert at_half.shares == [0.5, 0.0, 0.0, 0.5]


def test_figures_agree_with_themselves(model: LoopedModel) -> None:
    tokens = torch.randint(SMALL.vocabulary, (3, 20))
    figures = evaluate(model, [(tokens[:2, :-1], tokens[:2, 1:]), (tokens[2:, :-1], tokens[2:, 1:])], torch.float32)
    assert figures.tokens == 57
    assert figures.agreement[-1] == 1.0
    assert sum(figures.exit_probability) == pytest.approx(1.0, abs=1e-5)
