"""Joins the splits of `attention_decode` into the rows' attention."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="attention_merge",
    contract=1,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5},
        reason="the splits are summed in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
)


def attention_merge(part: Part, *, rows: Buffer, partial: Buffer, sums: Buffer, out: Buffer) -> Launch:
    """`out[i] = sum over splits of partial * exp(maximum - M) / sum over splits of sum * exp(maximum - M)`, M the largest.

    rows int32 [bucket, RECORD], partial float32 [bucket, heads, splits, head_dim], sums float32 [bucket, heads, splits, 2],
    out [bucket, heads * head_dim]. The partial of a split whose sum is 0 is not read.
    """
    bucket, heads, splits, head_dim = partial.sizes
    tile = next_power_of_2(splits)
    return KERNEL.launch(
        part,
        grid=(bucket, heads, 1),
        arguments={"rows": rows, "partial": partial, "sums": sums, "out": out},
        constants={"SPLITS": splits, "SPLIT_TILE": tile, "HEAD_DIM": head_dim},
        options=Options(num_warps=max(1, min(8, tile * head_dim // 1024)), num_stages=1),
    )
