"""`attention_decode` that also keeps its scores, from which `attention_select` chooses the keys to retain."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.kernels.attention_decode import KERNEL as DECODE
from ouro_build.kernels.attention_decode import OPTIONS, split_context
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.spec import Kernel

KERNEL = Kernel(
    name="attention_capture",
    contract=1,
    writes=(*DECODE.writes, "scores"),
    tolerance=DECODE.tolerance,
)


def attention_capture(
    part: Part,
    *,
    rows: Buffer,
    q: Buffer,
    block_tables: Buffer,
    kv: Buffer,
    partial: Buffer,
    sums: Buffer,
    scores: Buffer,
    layer: int,
    layers: int,
) -> Launch:
    """What `attention_decode` does, bit for bit, and the scores of positions 0 .. the row's own.

    Buffers as there; scores float32 [bucket, heads, contexts] = `q k^T * head_dim^-0.5`, NaN as -inf,
    left as it was past the row's position.
    """
    bucket, _, splits, _ = partial.sizes
    arguments, constants = split_context(q, block_tables, kv, splits, layer, layers)
    buffers = {"rows": rows, "q": q, "block_tables": block_tables, "kv": kv, "partial": partial, "sums": sums, "scores": scores}
    return KERNEL.launch(
        part,
        grid=(bucket, page_shape(kv)[0], splits),
        arguments={**buffers, **arguments},
        constants={**constants, "SCORES": scores.sizes[2]},
        options=OPTIONS,
    )
