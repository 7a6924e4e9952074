"""Cases of `linear_silu`: rows with holes, sizes that tiles do not divide."""

import torch

from ouro_build.kernels.linear_silu import linear_silu
from tests.kernel_cases import PART, Case, normal
from tests.kernel_cases.linear import holes
from tests.kernel_harness import buffer, in_blocks, matrix_buffer, poisoned, row_records

# (I, K)
SHAPES = ((64, 128), (40, 96), (176, 70))


def case(dtype: str, device: str = "cpu", bucket: int = 4, shape: tuple[int, int] = (64, 128)) -> Case:
    """Activations of inactive rows are NaN."""
    size, width = shape
    out, x, weight = (
        buffer("out", dtype, bucket, size),
        buffer("x", dtype, bucket, width),
        matrix_buffer("weight", dtype, 2 * size, width),
    )
    launch = linear_silu(PART, rows=buffer("rows", "int32", bucket, 8), x=x, weight=weight, out=out)
    slots = holes(bucket)
    tensors = {
        "rows": row_records(slots, device),
        "x": poisoned(x, device=device),
        "weight": in_blocks(normal("cpu", "float32", 2 * size, width) * width**-0.5).to(poisoned(weight).dtype).to(device),
        "out": poisoned(out, device=device),
    }
    used = torch.tensor([i for i, slot in enumerate(slots) if slot >= 0])
    tensors["x"][used.to(device)] = normal(device, dtype, len(used), width, seed=1)
    return Case(launch, tensors)
