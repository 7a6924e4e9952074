"""A run falls in loss, is resumed exactly, and its rate follows the course."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from looped.data import Tokens
from looped.model import LoopedModel, Shape
from looped.objective import Objective, objective
from looped.optimizer import Course, optimizers
from looped.state import Progress, restore, save
from torch.optim import Optimizer

SMALL = Shape(vocabulary=64, hidden=32, intermediate=48, layers=1, heads=1, head_dim=32, loops=4, context=32)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "train.npz", tokens=np.tile(random.integers(0, 64, 50, dtype=np.uint16), 60))
    return Tokens(tmp_path / "train.npz", SMALL.context, seed=3)


def _steps(model: LoopedModel, made: Sequence[Optimizer], tokens: Tokens, first: int, last: int) -> list[float]:
    seen = []
    for step in range(first, last):
        for optimizer in made:
            optimizer.zero_grad()
        inputs, targets = tokens.batch(step, 4)
        loss, _, _ = objective(model, inputs, targets, torch.float32, Objective())
        torch.autograd.backward(loss)
        for optimizer in made:
            optimizer.step()
        seen.append(loss.item())
    return seen


def _fresh() -> tuple[LoopedModel, list[Optimizer]]:
    torch.manual_seed(1)
    model = LoopedModel(SMALL)
    return model, optimizers(model, 3e-3)


def test_loss_falls_and_a_resumed_run_is_the_same_run(tokens: Tokens, tmp_path: Path) -> None:
    model, made = _fresh()
    whole = _steps(model, made, tokens, 0, 60)
    assert whole[-1] < 0.6 * whole[0]

    first, made_first = _fresh()
    _steps(first, made_first, tokens, 0, 20)
    save(tmp_path / "state", Progress(20, 1.5, None), {"seed": 1}, first, made_first)
    second, made_second = _fresh()
    progress = restore(tmp_path / "state", {"seed": 1}, second, made_second)
    assert progress == Progress(20, 1.5, None)
    assert _steps(second, made_second, tokens, 20, 60) == whole[20:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second.parameters(), strict=True))


def test_another_runs_state_is_refused(tmp_path: Path) -> None:
    model, made = _fresh()
    save(tmp_path, Progress(), {"seed": 1}, model, made)
    with pytest.raises(ValueError, match="seed 1, now 2"):
        restore(tmp_path, {"seed": 2}, model, made)


def test_a_descent_that_has_begun_is_of_one_length(tmp_path: Path) -> None:
    model, made = _fresh()
    save(tmp_path, Progress(20, 1.5, 12, 3.0), {}, model, made)
    begun = restore(tmp_path, {}, model, made)
    begun.check_length(3.0)
    with pytest.raises(ValueError, match=r"began at step 12, for 3 minutes in all: give --minutes 3,"):
        begun.check_length(5.0)
    Progress(20, 1.5).check_length(5.0)


def test_a_pass_visits_every_window_once_and_targets_follow_inputs(tokens: Tokens) -> None:
    windows = tokens.windows
    inputs, targets = tokens.batch(0, windows)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    starts = [tokens._window(0, i).ctypes.data for i in range(windows)]
    assert len(set(starts)) == windows
    assert tokens._window(0, 0).shape == (SMALL.context + 1,)
    assert all(len(tokens._window(epoch, i)) == SMALL.context + 1 for epoch in range(5) for i in range(windows))


def test_batches_depend_on_the_step_alone(tokens: Tokens) -> None:
    late = tokens.batch(40, 4)
    tokens.batch(3, 4)
    assert all(torch.equal(a, b) for a, b in zip(late, tokens.batch(40, 4), strict=True))


def test_evaluation_reads_every_window_in_order(tokens: Tokens) -> None:
    batches = tokens.in_order(7)
    assert sum(len(inputs) for inputs, _ in batches) == tokens.windows
    assert len(tokens.in_order(4, limit=6)[1][0]) == 2


def test_course_warms_up_stays_and_descends_to_nothing() -> None:
    course = Course(rate=1.0, warmup=10, descent=0.4)
    start = course.descent_from(1000)
    assert (start, course.last_step(start)) == (600, 1000)
    assert course.at(0, None) == pytest.approx(0.1)
    assert course.at(300, start) == course.at(5000, None) == 1.0
    assert course.at(800, start) == pytest.approx(0.5)
    assert 0 < course.at(999, start) < 0.01


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 99, 1001])
def test_a_run_of_given_steps_has_a_descent_within_it(steps: int) -> None:
    course = Course(warmup=1)
    start = course.descent_from(steps)
    assert 0 <= start < steps
    assert all(course.at(step, start) > 0 for step in range(steps) if step < course.last_step(start))
