"""`ouro-artifact tune` on this GPU: a table comes of it, and a build that takes it is right."""

from __future__ import annotations

from pathlib import Path

from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.tuning import KINDS, Entry, Fragments, TuningTable, decode_table
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.tune import TuneOptions, tune
from ouro_build.builder.warm import warm
from tests.gpu.test_golden import make
from tests.reference_worker import GOLDEN

KERNELS = ("linear_silu", "attention_decode")
SMALL = Fragments(block_n=32, warps=1, step=64, ahead=1, x_ahead=1, maxnreg=32)
"""More sums than so few registers hold."""


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


def test_a_start_that_spills_is_left_for_what_does_not(tmp_path: Path) -> None:
    artifact = open_artifact(make(tmp_path / "first", str(GOLDEN / "mha-bf16"), dtype="bfloat16", buckets=(1, 4)))
    (target,) = artifact.manifest.targets
    entries = tuple(Entry(kernel="linear_silu", bits=16, rows=0, kind=kind, parameters=SMALL) for kind in KINDS["linear_silu"])
    start = TuningTable(name="small", arch=target.part.arch, source="a test", entries=entries)
    said: list[str] = []
    options = TuneOptions(
        cache=ImageCache(tmp_path / "images"), workers=8, kernels=("linear_silu",), buckets=(4,), tables=(start,)
    )
    found = tune(artifact, tmp_path / "table.json", options, said.append)
    print("\n".join(said))
    assert any(line.startswith("the step as it is spills (linear_silu ") for line in said)
    (step,) = found.steps
    assert step.us <= step.before_us
    assert all(site.tried > 0 for site in step.sites)
