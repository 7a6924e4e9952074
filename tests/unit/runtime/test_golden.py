"""The outputs of the model's published code, by the reference executor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.engine import Request
from tests.reference_worker import GOLDEN, GOLDEN_CASES, ReferenceWorker, reference_worker

LIMIT = 1e-4


@pytest.fixture(scope="module", params=GOLDEN_CASES)
def case(request: pytest.FixtureRequest) -> tuple[ReferenceWorker, str]:
    return reference_worker(str(GOLDEN / request.param)), request.param


def prompts(name: str) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = json.loads((GOLDEN / name / "golden.json").read_text())["prompts"]
    return found


def prompt_rows(worker: ReferenceWorker, ids: list[int]) -> list[RowInput]:
    first = worker.steps.geometry.decode_slots
    blocks = iter(range(worker.kv_blocks - 1, -1, -1))
    size = worker.steps.geometry.block_size
    return [RowInput(first + at, token, at, 0, next(blocks) if at % size == 0 else -1) for at, token in enumerate(ids)]


def test_every_loop_of_a_prompt(case: tuple[ReferenceWorker, str]) -> None:
    worker, name = case
    want = load_file(GOLDEN / name / "golden.safetensors")
    for i, prompt in prompts(name).items():
        rows = prompt_rows(worker, prompt["ids"])
        slots = [row.slot for row in rows]
        worker.steps.describe(rows)
        worker.steps.run("prelude", len(rows))
        for loop in range(worker.steps.model.loops):
            worker.steps.run("prefill", len(rows))
            assert abs(worker.steps.state("hidden")[slots] - want[f"{i}.hidden"][loop]).max() < LIMIT
            assert abs(worker.steps.state("gate_logits")[slots, loop] - want[f"{i}.gate_logit"][loop]).max() < LIMIT
            assert abs(worker.steps.state("exit_probability")[slots, loop] - want[f"{i}.exit_pdf"][loop]).max() < LIMIT
            assert abs(worker.steps.coda(slots) - want[f"{i}.logits"][loop]).max() < LIMIT


def test_decode_logits_with_the_recorded_tokens_fed(case: tuple[ReferenceWorker, str]) -> None:
    worker, name = case
    want = load_file(GOLDEN / name / "sparse.safetensors")
    engine = worker.engine()
    requests = {i: Request(p["ids"], 24, feed=p["greedy"], keep_logits=True) for i, p in prompts(name).items()}
    for request in requests.values():
        engine.submit(request)
    engine.run()
    for i, request in requests.items():
        assert abs(np.stack(request.logits) - want[f"{i}.r1.0.logits"]).max() < LIMIT


def test_free_running_greedy_tokens(case: tuple[ReferenceWorker, str]) -> None:
    worker, name = case
    engine = worker.engine()
    requests = {i: Request(p["ids"], 24) for i, p in prompts(name).items()}
    for request in requests.values():
        engine.submit(request)
    engine.run()
    assert {i: r.ids for i, r in requests.items()} == {i: p["greedy"] for i, p in prompts(name).items()}
