"""Starts a loop: the rows' hidden states, gathered from their slots, and their RMSNorm."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="rms_norm",
    contract=2,
    writes=("residual", "out"),
    tolerance=Tolerance(
        absolute={"bfloat16": 0.0, "float16": 0.0, "float32": 1e-6},
        relative={"bfloat16": 2**-6, "float16": 2**-9, "float32": 2e-6},
        reason="the sum of squares is taken in another order; a last-bit difference of 1/rms may round the value and its "
        "product with the weight to the neighbour each",
    ),
    weights=("weight",),
)


def rms_norm(part: Part, *, rows: Buffer, hidden: Buffer, weight: Buffer, residual: Buffer, out: Buffer, eps: float) -> Launch:
    """`residual[i] = hidden[slot of row i]`, `out[i] = norm(residual[i]) * weight`.

    rows int32 [bucket, RECORD], hidden [slots, size], weight [size], residual and out [bucket, size]; all but rows of one type.
    """
    bucket, size = out.sizes
    block = next_power_of_2(size)
    return KERNEL.launch(
        part,
        grid=(bucket, 1, 1),
        arguments={"rows": rows, "hidden": hidden, "weight": weight, "residual": residual, "out": out, "eps": eps},
        constants={"SIZE": size, "BLOCK": block},
        options=Options(num_warps=min(8, max(1, block // 256)), num_stages=1),
    )
