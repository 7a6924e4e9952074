"""Divides the rows of a batch by what they do, so that every attention kernel finds the others' rows inactive."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.artifacts.rows import SOURCE_LOOP
from ouro_build.kernels.spec import Kernel, Tolerance

KERNEL = Kernel(
    name="route_rows",
    contract=1,
    writes=("dense_rows", "capture_rows", "sparse_rows"),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
)


def route_rows(
    part: Part, *, rows: Buffer, dense_rows: Buffer, capture_rows: Buffer, sparse_rows: Buffer, captures: bool
) -> Launch:
    """The records of the rows that attend to all keys, of those that capture, and of those that capture or consume.

    All int32 [bucket, RECORD] in `Row` columns; a row that a list is not for is all -1 there, in its place. A row's `Mode` and
    loop decide; the lists' MODE column holds what it does now, for the loop that it is in. Without `captures` rows that would
    capture are dense.
    """
    return KERNEL.launch(
        part,
        grid=(rows.sizes[0], 1, 1),
        arguments={"rows": rows, "dense_rows": dense_rows, "capture_rows": capture_rows, "sparse_rows": sparse_rows},
        constants={"SOURCE_LOOP": SOURCE_LOOP, "CAPTURES": captures},
        options=Options(num_warps=1, num_stages=1),
    )
