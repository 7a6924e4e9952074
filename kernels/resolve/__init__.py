"""Turns a batch of slot ids into row records."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance

KERNEL = Kernel(
    name="resolve",
    contract=2,
    writes=("rows",),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
)


def resolve(part: Part, *, batch: Buffer, row_state: Buffer, rows: Buffer, loop_limit: int, position_limit: int) -> Launch:
    """`rows[i]` = the record of slot `batch[i]`; all -1 if there is none, or if its loop is not in 0 … loop_limit - 1 or its
    position not in 0 … position_limit - 1: later kernels look positions up in a block table, and trust them.

    batch int32 [at least bucket], -1 where there is no row; row_state int32 [slots, RECORD], rows int32 [bucket, RECORD],
    both in `Row` columns. Every record of `rows` is written.
    """
    return KERNEL.launch(
        part,
        grid=(rows.sizes[0], 1, 1),
        arguments={
            "batch": batch,
            "row_state": row_state,
            "rows": rows,
            "loop_limit": loop_limit,
            "position_limit": position_limit,
        },
        constants={},
        options=Options(num_warps=1, num_stages=1),
    )
