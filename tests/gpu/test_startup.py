"""Start-up on this GPU: what is on the record, damage found while graphs are restored, first requests, torch beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ouro_build.artifacts.errors import ArtifactError, UsageError
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.records import StartupRecord, decode_record
from ouro_build.runtime import page_cache
from ouro_build.runtime.cli import cli
from ouro_build.runtime.given_memory import needed_bytes
from ouro_build.runtime.startup import TIME_ZERO
from ouro_build.runtime.worker import load
from tests.gpu.alone import ALONE
from tests.gpu.test_golden import golden, make
from tests.reference_worker import GOLDEN

NAME = "mha-bf16"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("startup"), str(GOLDEN / NAME), dtype="bfloat16")


@ALONE
def test_a_fresh_process_accounts_for_its_time(artifact: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.json", tmp_path / "s.json"
    prompts.write_text(json.dumps([golden(NAME)[0]["ids"]]))
    command = [sys.executable, "-P", "-m", "ouro_build.runtime.entry", "run", str(artifact), "--prompt-ids", str(prompts)]
    command += ["--max-tokens", "2", "--startup-out", str(out)]
    began = time.monotonic()
    subprocess.run(command, env={**os.environ, TIME_ZERO: repr(began)}, check=True, capture_output=True)
    record = decode_record(out.read_bytes(), StartupRecord, "s")
    assert record.wall_s < time.monotonic() - began
    assert record.accounted >= 0.99
    assert record.graphs > 0
    assert record.node_us is not None
    assert {p.name for p in record.phases if p.beside} >= {"device", "check weights", "lock pages", "copy weights"}
    loaded = next(p for p in record.phases if p.name == "load")
    checked = next(p for p in record.phases if p.name == "check weights")
    assert checked.start_s + checked.seconds <= loaded.start_s + loaded.seconds + 1e-3, "nothing is ready before all is checked"


def test_damage_is_found_on_the_way(artifact: Path) -> None:
    weights = artifact / "weights.safetensors"
    weights.chmod(0o644)
    content = weights.read_bytes()
    damaged = bytearray(content)
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    try:
        with pytest.raises(ArtifactError, match=r"weights\.safetensors: chunk .* is damaged"):
            load(artifact)
        load(artifact, verify="fast").close()
    finally:
        weights.write_bytes(content)


@ALONE
def test_starts_are_measured_beside_torch(artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_cache, "DROP", tmp_path / "no" / "such")
    counts = ["--num-iters-cold", "1", "--num-iters-warmup", "1", "--num-iters-warm", "2"]
    arguments = ["bench", "startup", str(artifact), *counts, "--baseline", "torch", "--json"]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["executor"], len(said["baseline"]), said["cold_by"]) == ("graph", 2, "fadvise")
    assert said["accounted"] >= 0.99
    assert all(
        {"import torch", "weights", "graphs", "first token"} <= {p["name"] for p in run["phases"]} for run in said["baseline"]
    )
    shapes = [(f["program"], f["rows"]) for f in said["first_requests"]]
    assert shapes == [*(("decode", n) for n in (1, 2, 3, 8)), ("prefill", 16), ("prefill", 128)]


def test_a_load_is_served_by_graphs(artifact: Path) -> None:
    arguments = ["bench", "serve", str(artifact), "--concurrency", "1,3", "--input", "100", "--output", "20", "--json"]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert result.exit_code == 0, result.output
    for line in json.loads(result.stdout)["lines"]:
        assert line["share"] == 1.0
        assert line["output_tokens_s"] > 0


def as_tensor(tensor: torch.Tensor) -> object:
    return tensor


def as_capsule(tensor: torch.Tensor) -> object:
    return tensor.__dlpack__()


def as_pointer(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tensor.nbytes


@pytest.mark.parametrize("form", [as_tensor, as_capsule, as_pointer])
def test_a_torch_process_hands_its_memory_in(artifact: Path, form: Callable[[torch.Tensor], object]) -> None:
    prompts = [p["ids"] for p in golden(NAME)]
    with load(artifact) as worker:
        wanted = [o.ids for o in worker.generate(prompts, 8, ignore_eos=True)]
        blocks = min(worker.path.kv_blocks, 64)
    needed = needed_bytes(artifact, kv_blocks=blocks)
    tensors = {pool: torch.full((size,), 7, dtype=torch.uint8, device="cuda") for pool, size in needed.items()}
    with load(artifact, pools={pool: form(tensor) for pool, tensor in tensors.items()}) as worker:
        assert all(worker.memory.base(pool) == tensor.data_ptr() for pool, tensor in tensors.items())
        assert [o.ids for o in worker.generate(prompts, 8, ignore_eos=True)] == wanted
        stored = worker.memory.read(Pool.WEIGHTS, 0, needed[Pool.WEIGHTS])
    torch.cuda.synchronize()
    assert np.array_equal(tensors[Pool.WEIGHTS].cpu().numpy(), stored), "the tensors are torch's again"


def test_memory_of_the_host_is_refused(artifact: Path) -> None:
    size = needed_bytes(artifact)[Pool.WEIGHTS]
    with pytest.raises(UsageError, match="DLPack device 1:0, 2:0 is needed"):
        load(artifact, pools={"weights": torch.zeros(size, dtype=torch.uint8)})
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(UsageError, match=r"is memory of type 1|is no memory that CUDA knows"):
        load(artifact, pools={"weights": (pinned.data_ptr(), size)})
