"""Looks up the embeddings of the rows' tokens."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

_EXACT = {"bfloat16": 0.0, "float16": 0.0, "float32": 0.0}

KERNEL = Kernel(
    name="embedding",
    contract=2,
    writes=("hidden",),
    tolerance=Tolerance(absolute=_EXACT, relative=_EXACT, reason="a copy"),
)


def embedding(part: Part, *, rows: Buffer, weight: Buffer, hidden: Buffer) -> Launch:
    """`hidden[slot of row i] = weight[token of row i]`.

    rows int32 [bucket, RECORD], weight [vocabulary, size] in blocks, hidden [slots, size]; weight and hidden of one type.
    """
    size = hidden.sizes[1]
    block = min(1024, next_power_of_2(size))
    return KERNEL.launch(
        part,
        grid=(rows.sizes[0], ceil_div(size, block), 1),
        arguments={"rows": rows, "weight": weight, "hidden": hidden},
        constants={"SIZE": size, "BLOCK": block},
        options=Options(num_warps=max(1, block // 256), num_stages=1),
    )
