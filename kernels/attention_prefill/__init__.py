"""Attention of a prompt chunk's rows over the paged KV cache."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, LoadTimeValue, Options
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2
from ouro_build.kernels.tensor_cores import leaves_registers

KERNEL = Kernel(
    name="attention_prefill",
    contract=2,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 2e-5},
        relative={"bfloat16": 2**-6, "float16": 2**-9, "float32": 2e-5},
        reason="probabilities are rounded to the value type for the second product: half a unit in the last place of each, "
        "relative to the sum of |probability * value|, then one more of the result; float32 differs by the order of sums",
    ),
)


def attention_prefill(
    part: Part, *, rows: Buffer, q: Buffer, block_tables: Buffer, kv: Buffer, out: Buffer, layer: int, layers: int
) -> Launch:
    """`out[i] = softmax(q k^T * head_dim^-0.5) v` over positions 0 .. the row's own, in its loop's plane.

    rows int32 [bucket, RECORD], a request's rows adjacent and ascending; q [bucket, heads, head_dim] (rotated), block_tables
    int32 [requests, blocks], kv [planes, KV_BLOCKS, 2, kv_heads, block_size, head_dim] and out [bucket, heads * head_dim] of
    q's type. Right for rows in any order: order only keeps the number of passes over a tile of rows low.
    """
    bucket, heads, head_dim = q.sizes
    kv_heads, block_size, _ = page_shape(kv)
    # float32 is computed without tensor cores, from operands of twice the size: smaller tiles.
    full = kv.dtype == "float32"
    # 64 keys of a wide head take too many registers on most parts.
    narrow = full or (head_dim >= 128 and not leaves_registers(part))
    block_m = max(16, min(32 if full else 64, next_power_of_2(bucket)))
    return KERNEL.launch(
        part,
        grid=(ceil_div(bucket, block_m), heads, 1),
        arguments={
            "rows": rows,
            "q": q,
            "block_tables": block_tables,
            "kv": kv,
            "out": out,
            "plane_stride": LoadTimeValue.KV_PLANE_STRIDE,
            "block_stride": LoadTimeValue.KV_BLOCK_STRIDE,
            "layer": layer,
            "scale": head_dim**-0.5,
        },
        constants={
            "ROWS": bucket,
            "LAYERS": layers,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "TABLE_WIDTH": block_tables.sizes[1],
            "BLOCK_SIZE": block_size,
            "BLOCK_M": block_m,
            "TILE": 32 if narrow else 64,
            # two loops take more registers than most parts leave
            "APART": leaves_registers(part) and not full,
        },
        # block ids a step before keys and values, those a step before their use
        options=Options(num_warps=8 if full and block_m == 32 else 4, num_stages=3),
    )
