"""Gate and up projection of few rows and their gated product, in one pass over the weights."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.kernels.linear_few import fragment_options, fragment_shape
from ouro_build.kernels.sites import matrix_site
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div

KERNEL = Kernel(
    name="linear_silu",
    contract=2,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 2**-6, "float16": 2**-9},
        relative={"bfloat16": 2**-5, "float16": 2**-8},
        reason="gate and up are float32 sums in another order, each rounded to the type, perhaps to the neighbour; the product "
        "of the two roundings is rounded once more",
    ),
    weights=("weight",),
)


def linear_silu(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer) -> Launch:
    """`out[i] = silu(gate) * up` with `gate, up = weight[:I] @ x[i], weight[I:] @ x[i]`, each rounded to the type.

    rows int32 [bucket, RECORD], x [bucket, K], weight [2 I, K] in blocks, out [bucket, I], all but rows of
    one half-width type. Inactive rows of `out` are written too: with what their `x` makes of them.
    """
    bucket, size, width = rows.sizes[0], out.sizes[1], x.sizes[1]
    shape = fragment_shape(part, matrix_site(KERNEL.name, bucket, 2 * size, width, x.dtype))
    constants, options = fragment_options(shape, bucket, width)
    block = shape.block_n // 2  # half a program's weight rows are gate rows, half are up rows
    return KERNEL.launch(
        part,
        grid=(ceil_div(size, block), 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, "out": out},
        constants={"ROWS": bucket, "SIZE": size, "K": width, "BLOCK": block, **constants},
        options=options,
    )
