"""Copies a token's keys and values to the planes of the loops it skipped."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, LoadTimeValue, Options
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

_EXACT = {"bfloat16": 0.0, "float16": 0.0, "float32": 0.0}

KERNEL = Kernel(
    name="kv_copy",
    contract=2,
    writes=("kv",),
    tolerance=Tolerance(absolute=_EXACT, relative=_EXACT, reason="a copy"),
    updates=("kv",),
)


def kv_copy(part: Part, *, rows: Buffer, block_tables: Buffer, kv: Buffer, layers: int, loops: int) -> Launch:
    """For a row whose state is in loop e, so that e - 1 was the last it ran: its keys and values of loop e - 1 in every
    layer, at its position, go to loops e … loops - 1. Nothing for rows that ran none (e = 0) or all (e = loops).

    rows int32 [bucket, RECORD]; block_tables int32 [requests, blocks]; kv [planes, KV_BLOCKS, 2, kv_heads, block_size,
    head_dim], plane = loop * layers + layer.
    """
    kv_heads, block_size, head_dim = page_shape(kv)
    size = 2 * kv_heads * head_dim
    block = min(2048, next_power_of_2(size))
    return KERNEL.launch(
        part,
        grid=(rows.sizes[0], layers, ceil_div(size, block)),
        arguments={
            "rows": rows,
            "block_tables": block_tables,
            "kv": kv,
            "plane_stride": LoadTimeValue.KV_PLANE_STRIDE,
            "block_stride": LoadTimeValue.KV_BLOCK_STRIDE,
        },
        constants={
            "LAYERS": layers,
            "LOOPS": loops,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "TABLE_WIDTH": block_tables.sizes[1],
            "BLOCK": block,
        },
        options=Options(num_warps=max(1, block // 256), num_stages=1),
    )
