"""Where rows' keys and values go and by how much they are rotated: the same for every layer, so found once a loop."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="locate",
    contract=2,
    writes=("rows", "blocks", "rotation"),
    updates=("rows",),
    tolerance=Tolerance(
        absolute={"float32": 2e-6},
        relative={"float32": 0.0},
        reason="sine and cosine of a float32 angle differ in their last bits",
    ),
    weights=("inv_freq",),
)


def locate(
    part: Part, *, rows: Buffer, inv_freq: Buffer, block_tables: Buffer, blocks: Buffer, rotation: Buffer, block_size: int
) -> Launch:
    """`blocks[i]` = the KV block of the row's position; `rotation[i]` = cosines, then sines, of position * inv_freq.

    A row at whose position no block is bound (-1 in its table) becomes inactive: it would write into memory of others.

    rows int32 [bucket, RECORD]; inv_freq float32 [half]; block_tables int32 [requests, blocks]; blocks int32 [bucket];
    rotation float32 [bucket, 2, half]. Angles are float32 products.
    """
    bucket, _, half = rotation.sizes
    return KERNEL.launch(
        part,
        grid=(bucket, 1, 1),
        arguments={
            "rows": rows,
            "inv_freq": inv_freq,
            "block_tables": block_tables,
            "blocks": blocks,
            "rotation": rotation,
        },
        constants={
            "HALF": half,
            "BLOCK": next_power_of_2(half),
            "BLOCK_SIZE": block_size,
            "TABLE_WIDTH": block_tables.sizes[1],
        },
        options=Options(num_warps=1, num_stages=1),
    )
