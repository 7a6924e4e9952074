"""The small model that ships: whole, and as good as its card says."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer

from ouro_build.artifacts.checkpoint import Checkpoint, read_folder_config
from ouro_build.artifacts.config import read_config
from ouro_build.artifacts.packing import checkpoint_tensors
from ouro_build.artifacts.presets import SHIPPED
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.engine import Request
from tests.reference_worker import DATA, ReferenceWorker, reference_worker

FOLDER = SHIPPED["tiny-trained"]
LIMIT = 8_000_000
"""Bytes that the model may add to the package."""


@cache
def worker() -> ReferenceWorker:
    return reference_worker("preset:tiny-trained", prefill_buckets=(128, 1024), max_context=1024, buckets=(1, 4, 128))


def test_the_checkpoint_loads_strictly_and_is_small() -> None:
    config = read_config(read_folder_config(FOLDER))
    assert (config.loops, config.dtype, config.max_position) == (4, "bfloat16", 1024)
    checkpoint = Checkpoint(FOLDER, config)
    count = sum(checkpoint.tensor(t.name).size for t in checkpoint_tensors(config))
    assert 2_000_000 <= count <= 3_700_000
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= LIMIT


def test_its_tokenizer_gives_every_text_back() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for text in ("In the beginning", "naïve Ünïcødé — ⟨∀x⟩\n\ttabs", "0x1f\x00"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_greedy_continuations_are_the_recorded_ones() -> None:
    recorded = json.loads((DATA / "tiny_trained_greedy.json").read_text())
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    requests = [Request(tokenizer.encode(r["prompt"]).ids, len(r["ids"])) for r in recorded]
    engine = worker().engine()
    for request in requests:
        engine.submit(request)
    engine.run()
    assert [r.ids for r in requests] == [r["ids"] for r in recorded]


def test_the_loss_on_held_out_text_is_the_recorded_one() -> None:
    stored = json.loads((FOLDER / "heldout.json").read_text())
    losses = np.mean([sequence_losses(s["ids"]) for s in stored["sequences"]], axis=0)
    assert losses == pytest.approx(stored["loss"]["float32"], rel=0.01)
    assert losses[3] <= losses[1] - 0.03, "loops do not matter"


def sequence_losses(ids: list[int]) -> list[float]:
    """Nats a token after each loop, over all tokens but the first."""
    steps = worker().steps
    slots = list(range(steps.geometry.decode_slots, steps.geometry.decode_slots + len(ids)))
    size = steps.geometry.block_size
    steps.describe([RowInput(slots[i], t, i, 0, i // size if i % size == 0 else -1) for i, t in enumerate(ids)])
    steps.run("prelude", len(ids))
    losses = []
    for _ in range(steps.model.loops):
        steps.run("prefill", len(ids))
        logits = steps.coda(slots[:-1]).astype(np.float64)
        top = logits.max(1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
        losses.append(float(np.mean(log_sum - logits[np.arange(len(ids) - 1), ids[1:]])))
    return losses
