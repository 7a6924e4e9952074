"""Rotates queries and keys by their positions and writes keys and values to the paged cache."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Argument, Buffer, Constant, Launch, LoadTimeValue, Options
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

KERNEL = Kernel(
    name="rope_kv_write",
    contract=3,
    writes=("kv", "q"),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 2e-6},
        reason="a product may be fused with the sum; the result is rounded once",
    ),
    layered=("kv",),
)

_ELEMENTS = 2048  # of a program: 16 bytes a thread for each half in half-width types


def rope_kv_write(
    part: Part,
    *,
    rows: Buffer,
    blocks: Buffer,
    rotation: Buffer,
    qkv: Buffer,
    kv: Buffer,
    q: Buffer,
    layer: int,
    layers: int,
) -> Launch:
    """`q[i]` = the row's rotated queries; its rotated keys and its values go to `kv` at its plane, block and offset.

    rows int32 [bucket, RECORD]; blocks and rotation as `locate` leaves them; qkv [bucket, (heads + 2 * kv_heads) * head_dim]:
    queries, keys, values; kv [planes, KV_BLOCKS, 2, kv_heads, block_size, head_dim]; q [bucket, heads, head_dim]; qkv, kv and
    q of one type. Plane = loop * layers + layer. The rotation of the two halves of a head is float32, and the result is
    rounded once.
    """
    bucket, heads, head_dim = q.sizes
    places, constants = cache_write(blocks, rotation, kv, q, layer, layers)
    every = heads + 2 * page_shape(kv)[0]
    tile = max(1, min(next_power_of_2(every), _ELEMENTS // head_dim))
    return KERNEL.launch(
        part,
        grid=(bucket, ceil_div(every, tile), 1),
        arguments={"rows": rows, "qkv": qkv, **places},
        constants={**constants, "TILE": tile},
        options=Options(num_warps=max(1, tile * head_dim // 512), num_stages=1),
    )


def cache_write(
    blocks: Buffer, rotation: Buffer, kv: Buffer, q: Buffer, layer: int, layers: int
) -> tuple[dict[str, Argument], dict[str, Constant]]:
    """Arguments and constants of a kernel that rotates and writes `q` and, at a layer's planes, `kv`."""
    _, heads, head_dim = q.sizes
    kv_heads, block_size, _ = page_shape(kv)
    arguments: dict[str, Argument] = {
        "blocks": blocks,
        "rotation": rotation,
        "kv": kv,
        "q": q,
        "plane_stride": LoadTimeValue.KV_PLANE_STRIDE,
        "block_stride": LoadTimeValue.KV_BLOCK_STRIDE,
        "layer": layer,
    }
    constants: dict[str, Constant] = {
        "LAYERS": layers,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
    }
    return arguments, constants
