"""`ouro-worker bench decode` on this GPU, beside torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ouro_build.runtime.cli import cli
from tests.gpu.test_golden import make
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
    assert all(min(line["eager_ms"], line["graph_ms"]) > 0 for line in said["baseline"])
