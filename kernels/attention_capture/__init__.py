"""`attention_decode` that also keeps its scores, from which `attention_select` chooses the keys to retain."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.kernels.attention_decode import KERNEL as DECODE
from ouro_build.kernels.attention_decode import launch_over_splits
from ouro_build.kernels.spec import Kernel
from ouro_build.kernels.split_contexts import SplitRule

KERNEL = Kernel(
    name="attention_capture",
    contract=4,
    writes=(*DECODE.writes, "scores"),
    tolerance=DECODE.tolerance,
    early=("splits", "block_tables"),
    layered=DECODE.layered,
)


def attention_capture(
    part: Part,
    *,
    splits: Buffer,
    q: Buffer,
    block_tables: Buffer,
    kv: Buffer,
    partial: Buffer,
    sums: Buffer,
    scores: Buffer,
    layer: int,
    layers: int,
    rule: SplitRule,
) -> Launch:
    """What `attention_decode` does, bit for bit, and the scores of positions 0 .. the row's own.

    Buffers as there; scores float32 [bucket, heads, contexts] = `q k^T * head_dim^-0.5`, NaN as -inf,
    left as it was past the row's position.
    """
    return launch_over_splits(
        KERNEL, part, splits=splits, q=q, block_tables=block_tables, kv=kv, partial=partial, sums=sums, scores=scores,
        layer=layer, layers=layers, rule=rule,
    )  # fmt: skip
