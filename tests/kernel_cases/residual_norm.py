from ouro_build.kernels.residual_norm import residual_norm
from tests.kernel_cases import PART, ROWS, Case, normal
from tests.kernel_harness import buffer, poisoned, row_records

SIZES = (16, 96, 176, 640)


def case(dtype: str, device: str = "cpu", size: int = 96) -> Case:
    out, weight = buffer("out", dtype, len(ROWS), size), buffer("weight", dtype, size)
    launch = residual_norm(
        PART,
        rows=buffer("rows", "int32", len(ROWS), 8),
        update=buffer("update", dtype, len(ROWS), size),
        update_weight=weight,
        residual=buffer("residual", dtype, len(ROWS), size),
        weight=weight,
        out=out,
        eps=1e-6,
    )
    tensors = {
        "rows": row_records(ROWS, device),
        "update": 3 * normal(device, dtype, len(ROWS), size, seed=1),
        "update_weight": normal(device, dtype, size, seed=2),
        "residual": normal(device, dtype, len(ROWS), size, seed=3),
        "weight": normal(device, dtype, size, seed=4),
        "out": poisoned(out, device=device),
    }
    return Case(launch, tensors)
