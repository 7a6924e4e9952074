"""The outputs of the model's published code, by `launch` and `graph`, from artifacts built for this GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import ObservedKey
from ouro_build.builder.build import build
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.builder.warm import warm
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.machine import probe
from ouro_build.runtime.paths import Choice
from ouro_build.runtime.selftest import self_test
from ouro_build.runtime.worker import load
from tests.reference_worker import GOLDEN, GOLDEN_CASES

FLOAT32_LIMIT = 1e-3
CLEAR_MARGIN = 0.2


def make(folder: Path, model: str, **options: object) -> Path:
    """An artifact for this machine's GPU."""
    folder.mkdir(exist_ok=True)
    machine = probe()
    part = find_parts([f"sm_{machine.capability[0]}{machine.capability[1]}"])
    settings = {"buckets": (1, 2, 3, 8), "prefill_buckets": (16, 128), "max_context": 256, **options}
    preparation = prepare(BuildSpec(model, part, **settings))  # type: ignore[arg-type]
    return build(preparation, folder / "a.ouro", cache=ImageCache(folder.parent / "images"), workers=8).path


@pytest.fixture(scope="module", params=GOLDEN_CASES)
def float32(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return make(tmp_path_factory.mktemp(request.param), str(GOLDEN / request.param), dtype="float32"), request.param


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("bf16"), str(GOLDEN / "mha-bf16"), dtype="bfloat16")


def golden(name: str) -> list[dict[str, list[int]]]:
    return list(json.loads((GOLDEN / name / "golden.json").read_text())["prompts"].values())


@pytest.mark.parametrize("executor", ["launch", "graph", "reference"])
def test_float32_decode_logits_and_tokens(float32: tuple[Path, str], executor: Choice) -> None:
    path, name = float32
    want = load_file(GOLDEN / name / "sparse.safetensors")
    prompts = golden(name)
    with load(path, executor=executor) as worker:
        assert worker.executor == executor
        fed = worker.generate(
            [p["ids"] for p in prompts], 24, ignore_eos=True, feed=[p["greedy"] for p in prompts], logits=True
        )
        for i, output in enumerate(fed):
            assert abs(np.stack(output.logits) - want[f"{i}.r1.0.logits"]).max() < FLOAT32_LIMIT
        free = worker.generate([p["ids"] for p in prompts], 24, ignore_eos=True)
        assert [o.ids for o in free] == [p["greedy"] for p in prompts]
        assert self_test(worker).passed


@pytest.mark.parametrize("executor", ["launch", "graph"])
def test_bfloat16_choices_are_right_where_they_are_clear(bfloat16: Path, executor: Choice) -> None:
    prompts = golden("mha-bf16")
    with load(bfloat16, executor=executor) as worker:
        outputs = worker.generate([p["ids"] for p in prompts], 24, ignore_eos=True, feed=[p["greedy"] for p in prompts])
        assert self_test(worker).passed
    for prompt, output in zip(prompts, outputs, strict=True):
        clear = [i for i, margin in enumerate(prompt["top2_margin"]) if margin > CLEAR_MARGIN]
        assert clear
        assert [output.ids[i] for i in clear] == [prompt["greedy"][i] for i in clear]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gqa-fp32", "mha-bf16"])
def test_graph_equals_launch_bit_for_bit_in_every_pattern_of_live_rows(name: str, dtype: str, tmp_path: Path) -> None:
    artifact = open_artifact(make(tmp_path, str(GOLDEN / name), dtype=dtype))
    observed = warm(artifact, tmp_path / "observed")
    programs = {"prelude", "recurrent", "prefill", "coda", "sample", "advance", "kv_copy", "read"}
    assert {k.program for k in observed.keys} == programs
    assert all(_right(k) for k in observed.keys)
    assert all(k.patterns == 2**k.bucket - 1 for k in observed.keys if k.bucket <= 3)


def _right(key: ObservedKey) -> bool:
    return key.bit_equal is True and key.error is not None and key.error <= 1.0


def test_blocks_beyond_two_to_the_31_elements_and_4_gib_are_addressed_right(tmp_path: Path) -> None:
    """A plane alone is larger than 2^31 elements; the rows' blocks are the last ones."""
    if probe().memory_free < 85 << 30:
        pytest.skip("needs 85 GiB of free device memory")
    path = make(tmp_path, str(GOLDEN / "mha-bf16"), dtype="float32", max_context=2048, max_requests=2110, memory=80 << 30)
    with load(path, executor="graph") as worker:
        blocks = worker.path.kv_blocks
        assert (blocks - 64) * worker.artifact.manifest.kv.block_elements > 2**31
        engine = Engine(worker.steps, blocks, 8)
        engine._blocks._free.reverse()  # the highest numbers first
        requests = [Request(p["ids"], 24) for p in golden("mha-bf16")]
        for request in requests:
            engine.submit(request)
        engine.run()
        assert [r.ids for r in requests] == [p["greedy"] for p in golden("mha-bf16")]
