"""Applies the host's row inputs to the row state."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div

# One thread a record, so that no thread reads a state that another has already overwritten.
_ROWS = 32

KERNEL = Kernel(
    name="bind",
    contract=2,
    writes=("row_state", "block_tables"),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
    updates=("row_state",),
)


def bind(part: Part, *, bucket: int, inputs: Buffer, row_state: Buffer, block_tables: Buffer, block_size: int) -> Launch:
    """Apply the first `bucket` records of `inputs`, no two of which may name the same slot.

    inputs int32 [rows, RECORD] in `InputColumn` columns, row_state int32 [slots, RECORD] in `Row` columns, block_tables int32
    [requests, blocks]. A record whose slot is negative is skipped. Columns that are not negative replace the slot's; a
    position also makes the slot active. A slot that is active afterwards holds its own id and enters loop 0; one that is
    not stays as it was. A block that is not negative becomes the entry of the slot's request at the slot's position; nothing
    does where that is outside `block_tables`.
    """
    return KERNEL.launch(
        part,
        grid=(ceil_div(bucket, _ROWS), 1, 1),
        arguments={"inputs": inputs, "row_state": row_state, "block_tables": block_tables, "bucket": bucket},
        constants={
            "BLOCK_SIZE": block_size,
            "REQUESTS": block_tables.sizes[0],
            "TABLE_WIDTH": block_tables.sizes[1],
            "ROWS": _ROWS,
        },
        options=Options(num_warps=1, num_stages=1),
    )
