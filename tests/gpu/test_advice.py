"""The advisor against a rebuild: what it predicts for other buckets is what a worker with those buckets counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ouro_build.artifacts.records import CoverageRecord, encode_record
from ouro_build.builder.advise import advise
from ouro_build.builder.predict import predict, recorded, shapes
from ouro_build.builder.spec import advised_buckets
from ouro_build.runtime.worker import load
from tests.gpu.test_golden import make
from tests.reference_worker import GOLDEN

MODEL = str(GOLDEN / "mha-bf16")


def serve(artifact: Path) -> CoverageRecord:
    """Twelve prompts, as many at once as the worker takes, of lengths that leave fewer and fewer rows."""
    with load(artifact, executor="graph") as worker:
        for count in (3, 9, 14):
            worker.generate([[1 + i, 2, 3] for i in range(12)], count, ignore_eos=True)
            worker.generate([[5, 6]] * 5, 2 * count, ignore_eos=True)
        return worker.coverage()


@pytest.mark.parametrize("budget", [None, 6])
def test_what_is_predicted_is_what_a_rebuild_counts(tmp_path: Path, budget: int | None) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    before = serve(make(tmp_path / "before", MODEL, dtype="float32", buckets=(1, 8), max_requests=12))
    assert predict(shapes(before.steps), before.buckets) == recorded(before)
    advice = advise(before, max_graphs=budget)
    if budget is None:
        file = tmp_path / "c.json"
        file.write_bytes(encode_record(before))
        assert advised_buckets(file) == (advice.buckets, advice.max_requests)
    rebuilt = make(tmp_path / "after", MODEL, dtype="float32", buckets=advice.buckets, max_requests=12)
    after = serve(rebuilt)
    assert after.steps == before.steps
    assert recorded(after) == advice.after
    assert recorded(after).wasted_rows <= recorded(before).wasted_rows
