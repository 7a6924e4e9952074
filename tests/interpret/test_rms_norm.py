import pytest
import torch

from ouro_build.artifacts.parts import find_part
from ouro_build.kernels.rms_norm import rms_norm
from tests.kernel_harness import DTYPES, buffer, check, poisoned, row_records

PART = find_part("h200")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [64, 96, 176])
def test_matches_the_reference(dtype: str, size: int) -> None:
    residual, out = buffer("residual", dtype, 4, size), buffer("out", dtype, 4, size)
    launch = rms_norm(
        PART,
        rows=buffer("rows", "int32", 4, 8),
        hidden=buffer("hidden", dtype, 6, size),
        weight=buffer("weight", dtype, size),
        residual=residual,
        out=out,
        eps=1e-6,
    )
    torch.manual_seed(0)
    kind = DTYPES[dtype]
    check(
        launch,
        {
            "rows": row_records([3, -1, 0, 5]),
            "hidden": torch.randn(6, size).to(kind),
            "weight": torch.randn(size).to(kind),
            "residual": poisoned(residual),
            "out": poisoned(out),
        },
    )
