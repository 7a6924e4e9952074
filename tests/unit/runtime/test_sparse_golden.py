"""Sparse decoding end to end by the reference: the stored tokens and logits, by plans and by what takes their place."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file

from ouro_build.artifacts.records import Reason
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.runtime.engine import Request
from tests.reference_worker import GOLDEN, GOLDEN_CASES, ReferenceWorker, reference_worker

LIMIT = 1e-4
ALL = ("dense", "capture", "consume", "mixed")
RETENTIONS = (0.1, 0.3, 1.0)


@cache
def worker(name: str, retention: float, modes: tuple[str, ...]) -> ReferenceWorker:
    return reference_worker(
        str(GOLDEN / name), buckets=(1, 4), sparse=SparseSpec(modes, retention), retained_mass=True, max_context=160
    )


def golden(name: str, kind: str) -> dict[str, dict[str, dict[str, list[int]]]]:
    found: dict[str, dict[str, dict[str, list[int]]]] = json.loads((GOLDEN / name / f"{kind}.json").read_text())
    return found


def decoded(made: ReferenceWorker, name: str, *, fed: bool) -> dict[str, Request]:
    prompts = golden(name, "golden")["prompts"]
    requests = {i: Request(p["ids"], 24, feed=p["greedy"] if fed else (), keep_logits=fed) for i, p in prompts.items()}
    engine = made.engine(sparse=True)
    for request in requests.values():
        engine.submit(request)
    engine.run()
    return requests


@pytest.mark.parametrize("modes", [ALL, ("dense", "mixed")], ids=["plans", "mode_not_built"])
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_free_running_tokens(name: str, retention: float, modes: tuple[str, ...]) -> None:
    made = worker(name, retention, modes)
    made.coverage.clear()
    want = golden(name, "sparse")
    requests = decoded(made, name, fed=False)
    assert {i: r.ids for i, r in requests.items()} == {i: want[i][f"r{retention}"]["greedy"] for i in requests}
    seen = {(f.reason, f.mode) for f in made.coverage.record().fallbacks if f.program == "recurrent"}
    other = Reason.NO_DEVICE if modes == ALL else Reason.MODE_NOT_BUILT
    assert seen == {(Reason.NO_DEVICE, "dense"), (other, "capture"), (other, "consume")}
    pool = made.steps.references
    assert (pool is None) == (retention == 1.0)
    assert pool is None or (pool.free, pool.leaving) == (made.steps.geometry.reference_slots, 0)


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_logits_and_retained_mass_with_the_recorded_tokens_fed(name: str, retention: float) -> None:
    made = worker(name, retention, ALL)
    mass = made.steps.retained_mass
    if mass is not None:
        mass.clear()
    want = load_file(GOLDEN / name / "sparse.safetensors")
    requests = decoded(made, name, fed=True)
    for i, request in requests.items():
        assert abs(np.stack(request.logits) - want[f"{i}.r{retention}.logits"]).max() < LIMIT
    if mass is None:
        return
    seen, model = mass.record(), made.steps.model
    per_prompt = 23 * model.layers * model.heads
    assert seen.values == len(requests) * per_prompt == sum(seen.counts)
    stored = golden(name, "sparse")
    means = [float(stored[i][f"r{retention}"]["retained_mass"]) for i in requests]  # type: ignore[arg-type]
    assert seen.mean == pytest.approx(np.mean(means), abs=1e-5)
    assert seen.bytes >= 4 * seen.values
    assert 0 < seen.least <= seen.mean <= 1
