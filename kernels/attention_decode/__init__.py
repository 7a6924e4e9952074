"""Attention of single query rows over the paged KV cache, split over the context; `attention_merge` joins the splits."""

from __future__ import annotations

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.parts import KIB, Part
from ouro_build.artifacts.plan import Buffer, Launch, LoadTimeValue, Options
from ouro_build.artifacts.tuning import Splits
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.sites import Site, attention_site
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2
from ouro_build.kernels.split_contexts import EIGHT, SplitRule
from ouro_build.kernels.tensor_cores import leaves_registers
from ouro_build.kernels.tuning import Tuning, tuning_of

KERNEL = Kernel(
    name="attention_decode",
    contract=6,
    writes=("partial", "sums"),
    tolerance=Tolerance(
        absolute={"float32": 1e-4},
        relative={"float32": 1e-4},
        reason="float32 scores, exponentials and sums in another order, the running maximum's corrections among them; the "
        "tensor cores' products and sums where keys are of half width; the "
        "probabilities of grouped heads keep 16 bits in the tensor cores (two terms of the value type)",
    ),
    early=("splits", "block_tables", "kv"),
    settled=("kv",),
    layered=("kv",),
)

_MAX_TILE = 128
_MAX_LEAST = 128


def split_shape(part: Part, site: Site) -> Splits:
    """How programs of `part` work at `site`, by tables for its architecture: what fills one's registers spills on another."""
    own = Tuning(tuple(table for table in tuning_of(part).tables if table.arch == part.arch))
    found = own.parameters(site, Splits)
    return reasoned_splits(part, site) if found is None else found


def reasoned_splits(part: Part, site: Site) -> Splits:
    """Where no table has an entry.

    A single head orders its own loads: two programs a multiprocessor, each with a tile of keys and values in registers or on
    its way there, hide the latency of memory; where the compiler needs more registers for the same, there is room for one.
    Grouped heads take tiles through shared memory, and smaller ones leave room for more programs.
    """
    if site.kind == "grouped":
        size, warps, programs, maxnreg = 8 * KIB, 4, 4, 128
    elif leaves_registers(part):
        size, warps, programs, maxnreg = 32 * KIB, 8, 2, 128
    else:
        size, warps, programs, maxnreg = 32 * KIB, 8, 1, 168
    return Splits(tile_bytes=size, warps=warps, programs=programs, longest=64, shortest=1, stages=3, maxnreg=maxnreg)


def split_rule(part: Part, bucket: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> SplitRule:
    """How rows of a bucket are cut: into enough splits to fill the device when all rows are alike."""
    shape = split_shape(part, attention_site(KERNEL.name, bucket, heads, kv_heads, head_dim, dtype))
    tile = max(16, min(_MAX_TILE, shape.tile_bytes // (head_dim * DTYPES[dtype].bytes)))
    least = max(1, min(_MAX_LEAST, shape.programs * part.sm_count // (bucket * kv_heads)))
    return SplitRule(tile, least, shape.longest, shape.shortest)


def attention_decode(
    part: Part,
    *,
    splits: Buffer,
    q: Buffer,
    block_tables: Buffer,
    kv: Buffer,
    partial: Buffer,
    sums: Buffer,
    layer: int,
    layers: int,
    rule: SplitRule,
) -> Launch:
    """Each split's share of `softmax(q[i] k^T * head_dim^-0.5) v` over positions 0 .. the row's own, in its loop's plane.

    splits as `split_contexts` leaves them by `rule`; q [bucket, heads, head_dim] (rotated), block_tables int32 [requests,
    blocks], kv [planes, KV_BLOCKS, 2, kv_heads, block_size, head_dim] of q's type; partial float32 [bucket, heads, most,
    head_dim] = sum of exp(score - maximum) * value, sums float32 [bucket, heads, most, 2] = (maximum, sum of exp(score -
    maximum)).
    """
    return launch_over_splits(
        KERNEL, part, splits=splits, q=q, block_tables=block_tables, kv=kv, partial=partial, sums=sums, layer=layer,
        layers=layers, rule=rule,
    )  # fmt: skip


def launch_over_splits(
    kernel: Kernel,
    part: Part,
    *,
    splits: Buffer,
    q: Buffer,
    block_tables: Buffer,
    kv: Buffer,
    partial: Buffer,
    sums: Buffer,
    scores: Buffer | None = None,
    layer: int,
    layers: int,
    rule: SplitRule,
) -> Launch:
    """`kernel` as `attention_decode` is launched, with `scores` where it keeps them."""
    bucket, heads, most, head_dim = partial.sizes
    kv_heads, block_size, _ = page_shape(kv)
    if block_size % EIGHT:
        raise BuildError(f"KV blocks of {block_size} tokens are not whole eights", where=kernel.name)
    group = heads // kv_heads
    shape = split_shape(part, attention_site(KERNEL.name, bucket, heads, kv_heads, head_dim, kv.dtype))
    limit = splits.sizes[0] * kv_heads
    key_bytes = head_dim * DTYPES[kv.dtype].bytes
    return kernel.launch(
        part,
        grid=(min(limit, shape.programs * part.sm_count), 1, 1),
        arguments={
            "splits": splits,
            "q": q,
            "block_tables": block_tables,
            "kv": kv,
            "partial": partial,
            "sums": sums,
            **({} if scores is None else {"scores": scores}),
            "plane_stride": LoadTimeValue.KV_PLANE_STRIDE,
            "block_stride": LoadTimeValue.KV_BLOCK_STRIDE,
            "layer": layer,
            "scale": head_dim**-0.5,
        },
        constants={
            "LIMIT": 0 if limit <= shape.programs * part.sm_count else limit,
            "LAYERS": layers,
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "GROUP_TILE": 1 if group == 1 else max(16, next_power_of_2(group)),
            "HEAD_DIM": head_dim,
            "TABLE_WIDTH": block_tables.sizes[1],
            "BLOCK_SIZE": block_size,
            "MOST": most,
            "TILE": rule.tile,
            # the warps that share a tile: two eights each at least, as tensor cores take keys
            "WARPS": min(shape.warps, rule.tile // (2 * EIGHT)),
            # keys that a warp loads at once, 16 bytes a thread
            "LANES": max(1, min(EIGHT, 32 * 16 // key_bytes)),
            "FRAGMENTS": DTYPES[kv.dtype].bytes == 2 and head_dim % 32 == 0,
            **({} if scores is None else {"SCORES": scores.sizes[2]}),
        },
        # grouped heads: block ids, then keys and values a tile ahead of their use
        # Captures leave the bits of dense attention: that must not hang on which product a compiler fuses with a sum.
        options=Options(
            num_warps=shape.warps, num_stages=shape.stages, maxnreg=shape.maxnreg, fusion=False, carveout=shape.carveout
        ),
    )
