"""The torch references of sparse attention against its definition, written down once more and plainly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ouro_build.artifacts.rows import ReferenceRecord
from ouro_build.kernels.attention_select.reference import retained_keys
from ouro_build.kernels.paged_kv.reference import context
from tests.kernel_cases.attention import LAYER, LAYERS
from tests.kernel_cases.sparse import CAPTURED, CONSUMED, Row, Scene
from tests.kernel_harness import run_reference

LIVE = [i for i, row in enumerate(CAPTURED) if row is not None]
SHAPE = (6, 2, 16)


def scores_and_values(scene: Scene, row: Row, q: Tensor) -> tuple[Tensor, Tensor]:
    """[heads, n] and [heads, n, head_dim] of a row's whole context, a head after another."""
    keys, values = context(scene.ctx.kv, scene.ctx.tables[row.request], row.loop * LAYERS + LAYER, row.position + 1)
    group = SHAPE[0] // SHAPE[1]
    scores = torch.stack([keys[h // group] @ q[h].float() / math.sqrt(SHAPE[2]) for h in range(SHAPE[0])])
    return scores, torch.stack([values[h // group] for h in range(SHAPE[0])])


@pytest.mark.parametrize("retention", [0.1, 0.3])
def test_capture_and_consume_are_what_they_are_defined_as(retention: float) -> None:
    scene = Scene(shape=SHAPE, retention=retention)
    out = scene.run(CAPTURED, "capture", run=run_reference)
    later = scene.run(CONSUMED, "consume", run=run_reference)
    asked, asked_later = scene.inputs(CAPTURED)["q"], scene.inputs(CONSUMED)["q"]
    held = scene.remembered
    for i in LIVE:
        row, then = CAPTURED[i], CONSUMED[i]
        assert row is not None
        assert then is not None
        scores, values = scores_and_values(scene, row, asked[i])
        new_scores, new_values = scores_and_values(scene, then, asked_later[i])
        n = row.position + 1
        k = min(n, max(1, math.ceil(n * retention)))
        assert held["reference_records"][row.slot, LAYER].tolist() == [row.generation, k]
        for head in range(SHAPE[0]):
            p = scores[head].softmax(0)
            chosen = sorted(sorted(range(n), key=lambda j: (-float(scores[head, j]), j))[:k])
            mass = p[chosen].sum()
            contribution = (p[chosen] / mass) @ values[head, chosen]
            attended = new_scores[head, chosen].softmax(0) @ new_values[head, chosen]
            stored = {name: tensor[row.slot, LAYER, head] for name, tensor in held.items() if tensor.ndim > 3 or "mass" in name}
            assert stored["reference_keys"][:k].tolist() == chosen
            torch.testing.assert_close(stored["reference_mass"], mass)
            torch.testing.assert_close(stored["reference_contribution"], contribution)
            torch.testing.assert_close(stored["reference_output"], p @ values[head])
            torch.testing.assert_close(out[i, head], p @ values[head])
            torch.testing.assert_close(later[i, head], p @ values[head] + mass * (attended - contribution))


def test_the_fewer_keys_the_further_from_dense() -> None:
    """And the less mass: on average over rows and heads, as a share of the output."""
    distances, masses = [], []
    for retention in (0.05, 0.1, 0.3, 0.6, 0.9, 0.9999):
        scene = Scene(shape=SHAPE, retention=retention)
        scene.run(CAPTURED, "capture", run=run_reference)
        sparse, dense = (scene.run(CONSUMED, mode, run=run_reference)[LIVE] for mode in ("consume", "dense"))
        distances.append(float((sparse - dense).norm() / dense.norm()))
        masses.append(float(scene.remembered["reference_mass"][:, LAYER].mean()))
    assert distances == sorted(distances, reverse=True)
    assert masses == sorted(masses)
    assert distances[-1] < 1e-6 < distances[0]
    assert masses[-1] == pytest.approx(1.0)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
@settings(max_examples=200)
def test_of_equal_scores_the_first_are_retained(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    found = retained_keys(torch.tensor([values], dtype=torch.float32), count)[0].tolist()
    assert found == sorted(sorted(range(len(values)), key=lambda j: (-values[j], j))[:count])


def test_both_zeros_are_one_score() -> None:
    assert retained_keys(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2)[0].tolist() == [0, 1]


def test_the_table_decides_how_many() -> None:
    scene = Scene(shape=SHAPE, retention=0.3)
    scene.tensors["retained_counts"].fill_(1)
    scene.run(CAPTURED, "capture", run=run_reference)
    assert (scene.tensors["reference_records"][:, LAYER, ReferenceRecord.COUNT] == 1).all()
