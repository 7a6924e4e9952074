"""A linear layer over rows: the choice between its kernel for few rows and its kernel for many."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.kernels.linear_few import linear_few
from ouro_build.kernels.linear_many import linear_many

# Up to here every row's products fit beside the weights in registers, and reading the weights once decides the time. In
# float32 there are no tensor cores to fill: beyond a few rows the tiled kernel reads each activation less often.
_FEW = {"bfloat16": 32, "float16": 32, "float32": 4}


def fused(bucket: int, dtype: str) -> bool:
    """Whether a bucket of rows is for the kernels that do more than a linear layer: `linear_rope`, `linear_silu`."""
    return dtype != "float32" and bucket <= _FEW[dtype]


def linear(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool = False) -> Launch:
    """`out[i] = weight @ x[i]` for active rows; with `gather`, `weight @ x[slot of row i]`.

    rows int32 [bucket, RECORD], x [bucket or more, K] (with `gather` [slots, K]), weight [N, K] of x's type, in blocks, out
    [bucket or more, N] of x's type or float32. Sums are float32, in the same order whatever the bucket's other rows are.
    """
    rule = linear_few if rows.sizes[0] <= _FEW[weight.dtype] else linear_many
    return rule(part, rows=rows, x=x, weight=weight, out=out, gather=gather)
