"""Joins the splits of `attention_decode` into the rows' attention."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="attention_merge",
    contract=2,
    writes=("out",),
    early=("counts",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5},
        reason="the splits are summed in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
)

_TILE = 16  # splits that are read before it is known how many there are


def attention_merge(part: Part, *, counts: Buffer, partial: Buffer, sums: Buffer, out: Buffer) -> Launch:
    """`out[i] = sum over splits of partial * exp(maximum - M) / sum over splits of sum * exp(maximum - M)`, M the largest.

    counts int32 [bucket], 0 for an inactive row; partial float32 [bucket, heads, most, head_dim], sums float32 [bucket,
    heads, most, 2], of which the first counts[i] splits count; out [bucket, heads * head_dim].
    """
    bucket, heads, most, head_dim = partial.sizes
    tile = min(_TILE, next_power_of_2(most))
    return KERNEL.launch(
        part,
        grid=(bucket, heads, 1),
        arguments={"counts": counts, "partial": partial, "sums": sums, "out": out},
        constants={"MOST": most, "TILE": tile, "HEAD_DIM": head_dim},
        options=Options(num_warps=max(1, min(4, tile * head_dim // 1024)), num_stages=1),
    )
