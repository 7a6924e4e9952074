"""The figures of sparse decoding on held-out text: what they are of, and that less of the keys is further from dense."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sparse_quality import decode, quality, table

from ouro_build.artifacts.presets import SHIPPED


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    stored = json.loads((SHIPPED["tiny-trained"] / "heldout.json").read_text())["sequences"]
    return [text["ids"][:72] for text in stored[:2]]


def test_figures_of_a_share_of_the_keys(texts: list[list[int]]) -> None:
    logits, mass = decode(texts, 48, 1.0)
    assert logits.shape == (2, 72 - 48 - 1, 4096)
    assert mass == 1.0
    dense = logits.argmax(-1)
    found = [quality(texts, 48, retention, dense) for retention in (0.05, 0.5, 1.0)]
    assert [q.tokens for q in found] == [46] * 3
    assert found[2].agreement == 1.0
    assert found[0].mass < found[1].mass < found[2].mass == 1.0
    assert found[0].agreement <= found[1].agreement
    assert abs(found[1].loss - found[2].loss) < abs(found[0].loss - found[2].loss)
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    wanted = np.array([t[49:] for t in texts])
    nats = log_sum - np.take_along_axis(logits, wanted[..., None], -1)[..., 0]
    assert found[2].loss == pytest.approx(nats.mean(), rel=1e-5)
    assert found[2].perplexity == pytest.approx(np.exp(nats.mean()), rel=1e-5)
    assert table(found).splitlines()[-1].startswith("| 1 | 1.0000 |")
