import torch

from ouro_build.kernels.silu_mul import silu_mul
from tests.kernel_cases import PART, ROWS, Case, normal
from tests.kernel_harness import buffer, poisoned, row_records

SIZES = (64, 176, 1100)
# Gates at which exp overflows, the activation underflows, and both are exact.
EXTREMES = (-200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 200.0)


def case(dtype: str, device: str = "cpu", size: int = 96) -> Case:
    out = buffer("out", dtype, len(ROWS), size)
    gate_up = 4 * normal(device, dtype, len(ROWS), 2 * size)
    gate_up[:, : len(EXTREMES)] = torch.tensor(EXTREMES, device=device).to(gate_up.dtype)
    launch = silu_mul(
        PART, rows=buffer("rows", "int32", len(ROWS), 8), gate_up=buffer("gate_up", dtype, len(ROWS), 2 * size), out=out
    )
    return Case(launch, {"rows": row_records(ROWS, device), "gate_up": gate_up, "out": poisoned(out, device=device)})
