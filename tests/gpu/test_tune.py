"""`ouro-artifact tune` on this GPU: a table comes of it, and a build that takes it is right."""

from __future__ import annotations

from pathlib import Path

from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.tuning import decode_table
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.tune import TuneOptions, tune
from ouro_build.builder.warm import warm
from tests.gpu.test_golden import make
from tests.reference_worker import GOLDEN

KERNELS = ("linear_silu", "attention_decode")


def test_a_tuned_build_is_right(tmp_path: Path) -> None:
    model = str(GOLDEN / "mha-bf16")
    artifact = open_artifact(make(tmp_path / "first", model, dtype="bfloat16", buckets=(1, 4)))
    said: list[str] = []
    output = tmp_path / "table.json"
    options = TuneOptions(cache=ImageCache(tmp_path / "images"), workers=8, kernels=KERNELS, buckets=(4,))
    found = tune(artifact, output, options, said.append)
    print("\n".join(said))
    (step,) = found.steps
    assert (step.family, step.bucket, step.context) == ("decode", 4, 256)
    assert {site.kernel for site in step.sites} == set(KERNELS)
    assert all(site.tried > 0 for site in step.sites)
    assert min(step.us, step.before_us) > 0
    table = decode_table(output.read_bytes(), str(output))
    assert table.device is not None
    assert table.digest == found.digest
    rebuilt = open_artifact(make(tmp_path / "second", model, dtype="bfloat16", buckets=(1, 4), tuning=(table,)))
    (target,) = rebuilt.manifest.targets
    assert [r.name for r in target.tuning][:1] == [table.name]
    warm(rebuilt, tmp_path / "observed")  # raises for a plan that is not right in every bit or within the tolerance
