"""Attention of single query rows over the paged KV cache, split over the context; `attention_merge` joins the splits."""

from __future__ import annotations

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.parts import KIB, Part
from ouro_build.artifacts.plan import Argument, Buffer, Constant, Launch, LoadTimeValue, Options
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

KERNEL = Kernel(
    name="attention_decode",
    contract=2,
    writes=("partial", "sums"),
    tolerance=Tolerance(
        absolute={"float32": 1e-4},
        relative={"float32": 1e-4},
        reason="float32 scores, exponentials and sums in another order, the running maximum's corrections among them; the "
        "probabilities of grouped heads keep 16 bits in the tensor cores (two terms of the value type)",
    ),
)

# Programs a multiprocessor: enough loads in flight to hide the latency of memory, and an even finish.
_PROGRAMS = 4
# The merge holds every split's share of a head in registers.
_MAX_SPLITS = 128
# Keys of one step. A tile of 8 KiB leaves registers for the next step's keys and values (single heads), and shared memory
# for several programs a multiprocessor (grouped heads).
_TILE_BYTES = 8 * KIB
_MAX_TILE = 64
# Grouped heads: block ids, then keys and values a tile ahead of their use; a single head orders its loads itself.
OPTIONS = Options(num_warps=4, num_stages=3)


def tile_keys(head_dim: int, dtype: str) -> int:
    """Keys that a program takes in one step; splits are made of whole tiles."""
    return max(16, min(_MAX_TILE, _TILE_BYTES // (head_dim * DTYPES[dtype].bytes)))


def context_splits(part: Part, bucket: int, kv_heads: int, max_context: int) -> int:
    """Parts that a row's context is cut into: enough to fill the device, no more than `max_context` has tiles."""
    wanted = ceil_div(_PROGRAMS * part.sm_count, bucket * kv_heads)
    return max(1, min(wanted, ceil_div(max_context, _MAX_TILE), _MAX_SPLITS))


def attention_decode(
    part: Part,
    *,
    rows: Buffer,
    q: Buffer,
    block_tables: Buffer,
    kv: Buffer,
    partial: Buffer,
    sums: Buffer,
    layer: int,
    layers: int,
) -> Launch:
    """Each split's share of `softmax(q k^T * head_dim^-0.5) v` over positions 0 .. the row's own, in its loop's plane.

    rows int32 [bucket, RECORD], q [bucket, heads, head_dim] (rotated), block_tables int32 [requests, blocks], kv [planes,
    KV_BLOCKS, 2, kv_heads, block_size, head_dim] of q's type, partial float32 [bucket, heads, splits, head_dim] = sum of
    exp(score - maximum) * value, sums float32 [bucket, heads, splits, 2] = (maximum, sum of exp(score - maximum)). A split
    without keys has sums (-inf, 0) and leaves its partial as it was.
    """
    bucket, _, splits, _ = partial.sizes
    arguments, constants = split_context(q, block_tables, kv, splits, layer, layers)
    return KERNEL.launch(
        part,
        grid=(bucket, page_shape(kv)[0], splits),
        arguments={"rows": rows, "q": q, "block_tables": block_tables, "kv": kv, "partial": partial, "sums": sums, **arguments},
        constants=constants,
        options=OPTIONS,
    )


def split_context(
    q: Buffer, block_tables: Buffer, kv: Buffer, splits: int, layer: int, layers: int
) -> tuple[dict[str, Argument], dict[str, Constant]]:
    """Arguments after the buffers, and constants, of a kernel that attends to a row's context in `splits` parts."""
    kv_heads, block_size, head_dim = page_shape(kv)
    group = q.sizes[1] // kv_heads
    arguments: dict[str, Argument] = {
        "plane_stride": LoadTimeValue.KV_PLANE_STRIDE,
        "block_stride": LoadTimeValue.KV_BLOCK_STRIDE,
        "layer": layer,
        "scale": head_dim**-0.5,
    }
    constants: dict[str, Constant] = {
        "LAYERS": layers,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_TILE": 1 if group == 1 else max(16, next_power_of_2(group)),
        "HEAD_DIM": head_dim,
        "TABLE_WIDTH": block_tables.sizes[1],
        "BLOCK_SIZE": block_size,
        "SPLITS": splits,
        "TILE": tile_keys(head_dim, kv.dtype),
    }
    return arguments, constants
