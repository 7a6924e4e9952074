"""Makes the sampled tokens the rows' next inputs."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance

KERNEL = Kernel(
    name="advance",
    contract=1,
    writes=("row_state",),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
)


def advance(part: Part, *, rows: Buffer, tokens: Buffer, row_state: Buffer) -> Launch:
    """The state of row i's slot: token = `tokens[i]`, position = the row's + 1, loop = 0; the rest stays.

    rows int32 [bucket, RECORD], tokens int32 [at least bucket], row_state int32 [slots, RECORD].
    """
    return KERNEL.launch(
        part,
        grid=(rows.sizes[0], 1, 1),
        arguments={"rows": rows, "tokens": tokens, "row_state": row_state},
        constants={},
        options=Options(num_warps=1, num_stages=1),
    )
