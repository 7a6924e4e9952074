"""Steps submitted ahead of their reading, on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.paths import Choice
from ouro_build.runtime.step import Steps
from ouro_build.runtime.worker import load
from tests.gpu.test_golden import make
from tests.reference_worker import GOLDEN

PROMPT = (17, 230, 5, 99, 301)
NEW = 12


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("steps"), str(GOLDEN / "mha-bf16"), dtype="float32")


def prompt(steps: Steps) -> list[RowInput]:
    """The prompt's rows for request 0 in block 0, the last in slot 0; what is generated stays in the first two blocks."""
    first, last = steps.geometry.decode_slots, len(PROMPT) - 1
    slots = [0 if i == last else first + i for i in range(len(PROMPT))]
    return [RowInput(s, t, i, 0, 0 if i == 0 else -1) for i, (s, t) in enumerate(zip(slots, PROMPT, strict=True))]


def rows(steps: Steps) -> list[list[RowInput]]:
    """One decode step after another: nothing but a new block comes from the host."""
    size = steps.geometry.block_size
    return [[RowInput(0, block=p // size if p % size == 0 else -1)] for p in range(len(PROMPT), len(PROMPT) + NEW)]


@pytest.mark.parametrize("executor", ["graph", "launch"])
def test_twelve_steps_ahead_choose_what_steps_one_by_one_do(artifact: Path, executor: Choice) -> None:
    with load(artifact, executor=executor) as worker:
        steps = worker.steps
        first = steps.prefill(prompt(steps), [0], logits=True)
        serial = [first, *(steps.decode(step, logits=True) for step in rows(steps))]
        submitted = [steps.submit_prefill(prompt(steps), [0], logits=True)]
        submitted += [steps.submit_decode(step, logits=True) for step in rows(steps)]
        for ahead, want in reversed(list(zip(submitted, serial, strict=True))):
            got = ahead.result()
            assert got.tokens.tolist() == want.tokens.tolist()
            assert got.logits is not None
            assert want.logits is not None
            assert np.array_equal(got.logits, want.logits)
    assert len({int(step.tokens[0]) for step in serial}) > 1
