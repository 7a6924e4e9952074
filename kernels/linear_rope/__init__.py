"""Query, key and value projection of few rows, rotated and written to its places, in one pass over the weights."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.kernels.linear_few import fragment_options, fragment_shape
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.rope_kv_write import cache_write
from ouro_build.kernels.sites import matrix_site
from ouro_build.kernels.spec import Kernel, Tolerance

KERNEL = Kernel(
    name="linear_rope",
    contract=3,
    writes=("kv", "q"),
    tolerance=Tolerance(
        absolute={"bfloat16": 2**-6, "float16": 2**-9},
        relative={"bfloat16": 2**-6, "float16": 2**-9},
        reason="the projection is a float32 sum in another order, rounded to the type, perhaps to the neighbour; the rotation "
        "mixes two of these and is rounded once more",
    ),
    weights=("weight",),
    layered=("kv",),
)


def linear_rope(
    part: Part,
    *,
    rows: Buffer,
    x: Buffer,
    weight: Buffer,
    blocks: Buffer,
    rotation: Buffer,
    kv: Buffer,
    q: Buffer,
    layer: int,
    layers: int,
) -> Launch:
    """`rope_kv_write` of `qkv[i] = weight @ x[i]`, rounded to the type in between.

    rows int32 [bucket, RECORD], x [bucket, K], weight [(heads + 2 * kv_heads) * head_dim, K] in blocks; the others as there;
    x, weight, kv and q of one half-width type.
    """
    bucket, heads, head_dim = q.sizes
    heads_in_all, width = heads + 2 * page_shape(kv)[0], x.sizes[1]
    places, cache = cache_write(blocks, rotation, kv, q, layer, layers)
    shape = fragment_shape(part, matrix_site(KERNEL.name, bucket, heads_in_all * head_dim, width, x.dtype))
    constants, options = fragment_options(shape, bucket, width)
    # A program takes some elements of a head's first half and the ones they are rotated with.
    pairs = min(shape.block_n, head_dim) // 2
    return KERNEL.launch(
        part,
        grid=(heads_in_all * (head_dim // 2 // pairs), 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, **places},
        constants={"ROWS": bucket, "K": width, **cache, "PAIRS": pairs, **constants},
        options=options,
    )
