"""Attention over a row's retained keys, split over them; `retained_merge` joins the splits.

Of a row that captures these are its retained contribution, from the scores that it has; of one that consumes, its attention
to the stored positions' keys and values of its own loop.
"""

from __future__ import annotations

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.parts import KIB, Part
from ouro_build.artifacts.plan import Argument, Buffer, Constant, Launch, LoadTimeValue, Options
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div

KERNEL = Kernel(
    name="attention_retained",
    contract=1,
    writes=("partial", "sums"),
    tolerance=Tolerance(
        absolute={"float32": 1e-4},
        relative={"float32": 1e-4},
        reason="float32 scores, exponentials and sums in another order, the running maximum's corrections among them",
    ),
    early=("rows", "block_tables", "reference_records", "reference_keys"),
    layered=("kv", "reference_records", "reference_keys"),
)

# Programs a multiprocessor holds at once: keys lie apart, so many of them must be on their way. More would wait for these.
_PROGRAMS = 4
# The merge holds every split's share of a head in registers.
_MAX_SPLITS = 128
# Keys of one step. A tile of 8 KiB leaves registers for the next step's keys and values.
_TILE_BYTES = 8 * KIB
_MAX_TILE = 64


def tile_keys(head_dim: int, dtype: str) -> int:
    """Retained keys that a program takes in one step; splits are made of whole tiles."""
    return max(16, min(_MAX_TILE, _TILE_BYTES // (head_dim * DTYPES[dtype].bytes)))


def retained_splits(part: Part, bucket: int, heads: int, most: int, tile: int) -> int:
    """Parts that up to `most` retained keys of a head are cut into: what runs at once, no more than there are tiles."""
    return max(1, min(_PROGRAMS * part.sm_count // (bucket * heads), ceil_div(most, tile), _MAX_SPLITS))


def attention_retained(
    part: Part,
    *,
    rows: Buffer,
    q: Buffer | None,
    block_tables: Buffer,
    kv: Buffer,
    scores: Buffer | None,
    reference_records: Buffer,
    reference_keys: Buffer,
    partial: Buffer,
    sums: Buffer,
    layer: int,
) -> Launch:
    """Each split's share of softmax(score) v over the retained keys of the row's reference slot at `layer`, in its plane.

    Rows of mode CAPTURE take `scores`, the others `q k^T * head_dim^-0.5`; with one of `scores` and `q` all rows take that one,
    whatever their mode.

    rows int32 [bucket, RECORD], q [bucket, heads, head_dim] (rotated), block_tables int32 [requests, blocks], kv [planes,
    KV_BLOCKS, 2, kv_heads, block_size, head_dim], scores float32 [bucket, heads, contexts], reference_records and
    reference_keys as in `attention_select`, partial float32 [bucket, heads, splits, head_dim] and sums float32 [bucket, heads,
    splits, 2] as in `attention_decode`. Rows whose slot holds nothing of theirs are left out.
    """
    bucket, heads, splits, head_dim = partial.sizes
    slots, layers, _, capacity = reference_keys.sizes
    kv_heads, block_size, _ = page_shape(kv)
    buffers = {
        "rows": rows,
        "q": q,
        "block_tables": block_tables,
        "kv": kv,
        "scores": scores,
        "reference_records": reference_records,
        "reference_keys": reference_keys,
        "partial": partial,
        "sums": sums,
    }
    arguments: dict[str, Argument] = {name: buffer for name, buffer in buffers.items() if buffer is not None}
    absent: dict[str, Constant] = {name: None for name, buffer in buffers.items() if buffer is None}
    return KERNEL.launch(
        part,
        grid=(bucket, heads, splits),
        arguments={
            **arguments,
            "plane_stride": LoadTimeValue.KV_PLANE_STRIDE,
            "block_stride": LoadTimeValue.KV_BLOCK_STRIDE,
            "layer": layer,
            "scale": head_dim**-0.5,
        },
        constants={
            **absent,
            "SLOTS": slots,
            "LAYERS": layers,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "TABLE_WIDTH": block_tables.sizes[1],
            "BLOCK_SIZE": block_size,
            "CAPACITY": capacity,
            "SCORES": 0 if scores is None else scores.sizes[2],
            "CONSUMES": q is not None,
            "SPLITS": splits,
            "TILE": tile_keys(head_dim, kv.dtype),
        },
        options=Options(num_warps=8 if kv.dtype == "float32" else 4, num_stages=1, fusion=False),
    )
