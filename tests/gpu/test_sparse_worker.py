"""Sparse decoding by artifacts built for this GPU: stored tokens, mixed batches, unbuilt modes, memory as planned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ouro_build.artifacts.fit import CONTEXT_BYTES
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import Reason
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.runtime.bench_sparse import bench_sparse
from ouro_build.runtime.paths import Choice
from ouro_build.runtime.worker import load
from tests.gpu.alone import ALONE
from tests.gpu.test_golden import make
from tests.mixed_batches import MixedBatches
from tests.reference_worker import GOLDEN

ALL = ("dense", "capture", "consume", "mixed")
CASES = ("mha-fp32", "gqa-fp32", "mha-bf16")
FLOAT32_LIMIT = 1e-3
BATCHES = 1000


def prompts(name: str) -> list[dict[str, list[int]]]:
    return list(json.loads((GOLDEN / name / "golden.json").read_text())["prompts"].values())


@pytest.mark.parametrize("retention", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_stored_tokens_and_logits_by_all_executors(name: str, retention: float, tmp_path: Path) -> None:
    path = make(tmp_path, str(GOLDEN / name), dtype="float32", sparse=SparseSpec(ALL, retention))
    stored = json.loads((GOLDEN / name / "sparse.json").read_text())
    logits = load_file(GOLDEN / name / "sparse.safetensors")
    given = prompts(name)
    executors: tuple[Choice, ...] = ("graph", "launch", "reference")
    for executor in executors:
        with load(path, executor=executor, retained_mass=retention < 1) as worker:
            assert worker.sparse
            free = worker.generate([p["ids"] for p in given], 24, ignore_eos=True)
            assert [o.ids for o in free] == [stored[str(i)][f"r{retention}"]["greedy"] for i in range(len(given))]
            fed = worker.generate(
                [p["ids"] for p in given], 24, ignore_eos=True, feed=[p["greedy"] for p in given], logits=True
            )
            for i, output in enumerate(fed):
                assert abs(np.stack(output.logits) - logits[f"{i}.r{retention}.logits"]).max() < FLOAT32_LIMIT
            mass = worker.coverage().retained_mass
            assert (mass is None) == (retention == 1.0)
            assert mass is None or (mass.values > 0 and 0 < mass.least <= mass.mean <= 1.0001)
            dense = worker.generate([p["ids"] for p in given], 24, ignore_eos=True, sparse=False)
            assert [o.ids for o in dense] == [p["greedy"] for p in given]


@pytest.mark.parametrize("executor", ["graph", "launch"])
@pytest.mark.parametrize("name", ["mha-fp32", "gqa-fp32"])
def test_random_mixed_batches_with_holes_give_what_uniform_ones_do(name: str, executor: Choice, tmp_path: Path) -> None:
    path = make(
        tmp_path, str(GOLDEN / name), dtype="float32", max_context=96, prefill_buckets=(64,), sparse=SparseSpec(ALL, 0.2)
    )
    with load(path, executor=executor) as worker:
        batches = MixedBatches(worker.steps, worker.memory, seed=5)
        seen = batches.run(BATCHES if executor == "graph" else BATCHES // 10)
        assert 0 < seen.captures < seen.mixed <= seen.batches
        batches.close()


def test_a_mode_that_was_not_built_gives_the_same_tokens_by_the_reference(tmp_path: Path) -> None:
    path = make(tmp_path, str(GOLDEN / "mha-fp32"), dtype="float32", sparse=SparseSpec(("dense", "mixed"), 0.3))
    stored = json.loads((GOLDEN / "mha-fp32" / "sparse.json").read_text())
    given = prompts("mha-fp32")
    with load(path) as worker:
        outputs = worker.generate([p["ids"] for p in given], 24, ignore_eos=True)
        assert [o.ids for o in outputs] == [stored[str(i)]["r0.3"]["greedy"] for i in range(len(given))]
        seen = {(f.mode, f.reason, f.path) for f in worker.coverage().fallbacks if f.reason is not Reason.BUCKET_MISS}
        assert seen == {(mode, Reason.MODE_NOT_BUILT, "reference") for mode in ("capture", "consume")}


@ALONE
def test_device_memory_is_what_the_plan_says(tmp_path: Path) -> None:
    path = make(tmp_path, str(GOLDEN / "gqa-fp32"), dtype="float32", sparse=SparseSpec(ALL, 0.1, reference_slots=64))
    with load(path) as worker:
        plan = worker.path.target.memory
        assert worker.memory.size(Pool.REFERENCES) == plan.pool_bytes(Pool.REFERENCES) > 0
        assert plan.reserve >= CONTEXT_BYTES
        assert not [note for note in worker.notes if note.startswith("memory:")]


def test_bench_sparse_checks_and_times(tmp_path: Path) -> None:
    path = make(tmp_path, str(GOLDEN / "gqa-fp32"), dtype="float32", sparse=SparseSpec(ALL, 0.1))
    record = bench_sparse(open_artifact(path, "all_but_weights"), [(1, 200), (8, 200)])
    assert record.right
    assert [(line.rows, line.context) for line in record.lines] == [(1, 200), (8, 200)]
    assert all(
        min(line.dense_ms, line.sparse_ms, line.attention_dense_ms, line.attention_sparse_ms) > 0 for line in record.lines
    )
