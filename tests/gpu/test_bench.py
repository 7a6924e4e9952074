"""`ouro-worker bench decode` on this GPU, beside torch."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from ouro_build.artifacts.parts import find_part
from ouro_build.kernels.read_pool import MOST_PROGRAMS, read_pool
from ouro_build.runtime.cli import cli
from ouro_build.runtime.timing import measure
from ouro_build.runtime.torch_baseline import captured, time_read, values_to_read
from tests.gpu.alone import ALONE
from tests.gpu.test_golden import make
from tests.kernel_harness import buffer, poisoned, run_source
from tests.reference_worker import GOLDEN


@pytest.mark.parametrize(("name", "dtype"), [("mha-bf16", "bfloat16"), ("gqa-fp32", "float32")])
def test_all_is_right_and_timed(name: str, dtype: str, tmp_path: Path) -> None:
    path = make(tmp_path, str(GOLDEN / name), dtype=dtype)
    shapes = ["--rows", "1,3", "--context", "100,256", "--prefill", "200"]
    arguments = ["bench", "decode", str(path), *shapes, "--baseline", "torch", "--json"]
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert result.return_value == 0, result.output
    said = json.loads(result.stdout)
    assert (said["executor"], said["unchecked"]) == ("graph", "")
    assert all(c["executors"] == ["graph", "launch"] and c["bit_equal"] for c in said["checks"])
    wanted = [(1, 100), (1, 256), (3, 100), (3, 256)]
    for part in ("lines", "baseline"):
        assert [(line["rows"], line["context"]) for line in said[part]] == wanted
    (prompt,), (beside,) = said["prompts"], said["prompt_baseline"]
    assert (prompt["tokens"], prompt["bucket"], prompt["chunks"]) == (200, 128, 2)
    assert prompt["ms"] > 0
    assert beside["eager_ms"] > 0
    assert said["read_tb_s"] > 0
    assert said["torch_read_tb_s"] > 0
    assert all(min(line["eager_ms"], line["graph_ms"]) > 0 for line in said["baseline"])


@ALONE
def test_the_kernel_that_reads_keeps_up_with_torch() -> None:
    """As many bytes as the weights of the larger preset: what `bench decode` calls the card's rate is one."""
    size = 5 << 30
    if torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip(f"needs {2 * size >> 30} GiB of free device memory")
    part = msgspec.structs.replace(
        find_part("h200"), sm_count=torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    )
    sums = buffer("sums", "int32", MOST_PROGRAMS)
    launch = read_pool(part, pool=buffer("pool", "int32", size // 4), sums=sums)
    tensors = {"pool": values_to_read(size, "cuda").view(torch.int32), "sums": poisoned(sums, device="cuda")}
    run_source(launch, tensors)
    ours = min(measure(captured(lambda: run_source(launch, tensors)), torch.cuda.synchronize))
    tensors.clear()
    torch.cuda.empty_cache()
    theirs = time_read(size, torch.cuda.current_device())
    print(f"read_pool {size / ours / 1e12:.3f} TB/s, torch.sum {size / theirs / 1e12:.3f} TB/s")
    assert theirs / ours >= 0.97
