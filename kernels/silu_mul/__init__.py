"""The gated activation of the MLP."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

KERNEL = Kernel(
    name="silu_mul",
    contract=1,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-7, "float16": 2**-22, "float32": 1e-7},
        relative={"bfloat16": 2**-6, "float16": 2**-9, "float32": 2e-6},
        reason="exp and the division differ in their last bits, which may round the activation and the product to the "
        "neighbour each; far below one, subnormals may be flushed",
    ),
)


def silu_mul(part: Part, *, rows: Buffer, gate_up: Buffer, out: Buffer) -> Launch:
    """`out[i] = silu(gate_up[i, :size]) * gate_up[i, size:]`.

    rows int32 [bucket, RECORD], gate_up [bucket, 2 * size], out [bucket, size]; gate_up and out of one type, to which the
    activation, taken in float32, is rounded before the product.
    """
    bucket, size = out.sizes
    block = min(1024, next_power_of_2(size))
    return KERNEL.launch(
        part,
        grid=(bucket, ceil_div(size, block), 1),
        arguments={"rows": rows, "gate_up": gate_up, "out": out},
        constants={"SIZE": size, "BLOCK": block},
        options=Options(num_warps=max(1, block // 256), num_stages=1),
    )
