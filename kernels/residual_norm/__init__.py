"""Adds a normalised update to the rows' residual stream, and normalises the sum for what follows."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="residual_norm",
    contract=2,
    writes=("residual", "out"),
    tolerance=Tolerance(
        absolute={"bfloat16": 2**-4, "float16": 2**-7, "float32": 1e-5},
        relative={"bfloat16": 2**-6, "float16": 2**-9, "float32": 5e-6},
        reason="the sums of squares are taken in another order; a last-bit difference of 1/rms may move the update by two "
        "neighbours, which the addition to a stream of opposite sign leaves as an absolute error, and the second norm "
        "and its weight enlarge",
    ),
    weights=("update_weight", "weight"),
    early=("rows",),
    updates=("residual",),
)


def residual_norm(
    part: Part,
    *,
    rows: Buffer,
    update: Buffer,
    update_weight: Buffer,
    residual: Buffer,
    weight: Buffer,
    out: Buffer,
    eps: float,
) -> Launch:
    """`residual[i] += norm(update[i]) * update_weight`, then `out[i] = norm(residual[i]) * weight`.

    rows int32 [bucket, RECORD]; update, residual and out [bucket, size]; both weights [size]; all but rows of one type. Every
    norm, product and sum is rounded to that type.
    """
    bucket, size = out.sizes
    block = next_power_of_2(size)
    return KERNEL.launch(
        part,
        grid=(bucket, 1, 1),
        arguments={
            "rows": rows,
            "update": update,
            "update_weight": update_weight,
            "residual": residual,
            "weight": weight,
            "out": out,
            "eps": eps,
        },
        constants={"SIZE": size, "BLOCK": block},
        # At least 8 elements a thread: no element is held twice, so none is read after it was overwritten.
        options=Options(num_warps=min(8, max(1, block // 512)), num_stages=1),
    )
