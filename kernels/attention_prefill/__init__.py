"""Attention of a prompt chunk's rows over the paged KV cache."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, LoadTimeValue, Options
from ouro_build.artifacts.tuning import Queries
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.sites import Site, attention_site
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div
from ouro_build.kernels.tensor_cores import leaves_registers
from ouro_build.kernels.tuning import tuning_of

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
    layered=("kv",),
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
    shape = query_shape(part, attention_site(KERNEL.name, bucket, heads, kv_heads, head_dim, kv.dtype))
    return KERNEL.launch(
        part,
        grid=(ceil_div(bucket, shape.rows), heads, 1),
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
            "BLOCK_M": shape.rows,
            "TILE": shape.tile,
            # two loops take more registers than most parts leave
            "APART": leaves_registers(part) and kv.dtype != "float32",
        },
        # block ids a step before keys and values, those a step before their use
        options=Options(num_warps=shape.warps, num_stages=shape.stages),
    )


def query_shape(part: Part, site: Site) -> Queries:
    """How programs of `part` work at `site`, by its tables."""
    found = tuning_of(part).parameters(site, Queries)
    return reasoned_queries(part, site) if found is None else found


def reasoned_queries(part: Part, site: Site) -> Queries:
    """Where no table has an entry: by what registers hold."""
    # float32 is computed without tensor cores, from operands of twice the size: smaller tiles.
    full = site.bits == 32
    # 64 keys of a wide head take too many registers on most parts.
    narrow = full or (site.sizes[2] >= 128 and not leaves_registers(part))
    few = site.rows <= 16
    rows = 16 if few else 32 if full or site.rows <= 32 else 64
    return Queries(rows=rows, tile=32 if narrow else 64, warps=8 if full and not few else 4, stages=3)
