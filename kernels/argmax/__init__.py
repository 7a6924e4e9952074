"""Greedy choice of tokens."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="argmax",
    contract=1,
    writes=("tokens",),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
)


def argmax(part: Part, *, rows: Buffer, logits: Buffer, tokens: Buffer) -> Launch:
    """`tokens[i]` = the lowest index of the largest of `logits[i]`.

    rows int32 [bucket, RECORD], logits [at least bucket, vocabulary], tokens int32 [at least bucket]. NaN is never the
    largest; a row of nothing but NaN gives 0. Zeros of both signs are equal.
    """
    vocabulary = logits.sizes[1]
    block = min(16384, next_power_of_2(vocabulary))
    return KERNEL.launch(
        part,
        grid=(rows.sizes[0], 1, 1),
        arguments={"rows": rows, "logits": logits, "tokens": tokens},
        constants={"VOCABULARY": vocabulary, "BLOCK": block},
        options=Options(num_warps=min(16, max(1, block // 256)), num_stages=1),
    )
