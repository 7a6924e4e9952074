"""`mixed` by the reference: what every row would get from a program of its own mode, and no row else is touched."""

from __future__ import annotations

from ouro_build.artifacts.records import Reason
from ouro_build.builder.sparse_spec import SparseSpec
from tests.mixed_batches import MixedBatches
from tests.reference_worker import ReferenceWorker, reference_worker

BATCHES = 80


def worker(*modes: str) -> ReferenceWorker:
    sparse = SparseSpec(modes, 0.2)
    return reference_worker(
        "preset:tiny", buckets=(1, 2, 5), prefill_buckets=(32,), max_context=48, max_requests=5, sparse=sparse
    )


def test_random_batches_with_holes_give_what_uniform_ones_do() -> None:
    made = worker("dense", "capture", "consume", "mixed")
    batches = MixedBatches(made.steps, made.memory, seed=0)
    seen = batches.run(BATCHES)
    assert seen.mixed >= 0.5 * seen.batches
    assert 0 < seen.captures < seen.mixed
    assert seen.worst == 0
    batches.close()


def test_a_mixed_mode_that_was_not_built_means_the_same() -> None:
    made = worker("dense", "capture", "consume")
    seen = MixedBatches(made.steps, made.memory, seed=1, limit=1e-5, exact=False).run(20)
    assert 0 < seen.captures < seen.mixed
    taken = {(f.reason, f.path) for f in made.coverage.record().fallbacks if f.mode == "mixed"}
    assert taken == {(Reason.MODE_NOT_BUILT, "reference")}
