"""Cases of `linear_few` and `linear_many`: rows with holes, more rows in x and out than in the batch."""

import torch

from ouro_build.artifacts.parts import Part
from ouro_build.kernels.linear_few import linear_few
from ouro_build.kernels.linear_many import linear_many
from tests.kernel_cases import PART, Case, normal
from tests.kernel_harness import buffer, in_blocks, matrix_buffer, poisoned, row_records

RULES = {"linear_few": linear_few, "linear_many": linear_many}

# (N, K): powers of two, and sizes with few or no divisors in common with any tile
SHAPES = ((64, 128), (70, 96), (96, 176), (33, 200), (40, 70))


def holes(bucket: int) -> list[int]:
    """Slots of `bucket` rows out of order, every third row inactive; a lone row is active."""
    return [-1 if i % 3 == 1 else (i * 5 + 2) % (bucket + 3) for i in range(bucket)]


def case(
    name: str,
    dtype: str,
    device: str = "cpu",
    bucket: int = 4,
    shape: tuple[int, int] = (64, 128),
    out_dtype: str | None = None,
    gather: bool = False,
    part: Part = PART,
) -> Case:
    """Activations of inactive rows, and of slots that no row has, are NaN."""
    size, width = shape
    out = buffer("out", out_dtype or dtype, bucket + 2, size)
    x = buffer("x", dtype, bucket + 3, width)
    weight = matrix_buffer("weight", dtype, size, width)
    launch = RULES[name](part, rows=buffer("rows", "int32", bucket, 8), x=x, weight=weight, out=out, gather=gather)
    slots = holes(bucket)
    tensors = {
        "rows": row_records(slots, device),
        "x": poisoned(x, device=device),
        "weight": in_blocks(normal("cpu", "float32", size, width) * width**-0.5).to(poisoned(weight).dtype).to(device),
        "out": poisoned(out, device=device),
    }
    used = torch.tensor([slot if gather else i for i, slot in enumerate(slots) if slot >= 0])
    tensors["x"][used.to(device)] = normal(device, dtype, len(used), width, seed=1)
    return Case(launch, tensors)
