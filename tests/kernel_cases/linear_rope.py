"""Cases of `linear_rope`: `rope_kv_write`'s rows, with activations and weights that make their projection."""

import torch

from ouro_build.kernels.linear_rope import linear_rope
from tests.kernel_cases import PART, Case, normal
from tests.kernel_cases.locate import places
from tests.kernel_cases.paged import Cache
from tests.kernel_harness import buffer, in_blocks, matrix_buffer, poisoned, row_records

# (heads, kv_heads, head_dim, K): equal and grouped heads, every head size, widths that tiles do not divide
SHAPES = ((2, 2, 16, 64), (4, 2, 32, 96), (6, 2, 64, 70), (3, 1, 128, 200))


def case(dtype: str, device: str = "cpu", shape: tuple[int, int, int, int] = (4, 2, 32, 96), bucket: int = 4) -> Case:
    """Two rows of one request in different blocks and loops, a hole, a row of another request; more rows are inactive."""
    heads, kv_heads, head_dim, width = shape
    cache = Cache(kv_heads=kv_heads, head_dim=head_dim)
    size = (heads + 2 * kv_heads) * head_dim
    q, x = buffer("q", dtype, bucket, heads, head_dim), buffer("x", dtype, bucket, width)
    weight = matrix_buffer("weight", dtype, size, width)
    launch = linear_rope(
        PART,
        rows=buffer("rows", "int32", bucket, 8),
        x=x,
        weight=weight,
        blocks=buffer("blocks", "int32", bucket),
        rotation=buffer("rotation", "float32", bucket, 2, head_dim // 2),
        kv=cache.kv_buffer(dtype),
        q=q,
        layer=cache.layers - 1,
        layers=cache.layers,
    )

    def column(*values: int) -> list[int]:
        return [*values, *[-1] * bucket][:bucket]

    slots = column(6, -1, 0, 2)
    tensors = {
        "rows": row_records(
            slots, device, position=column(0, -1, 11, 5), loop=column(0, -1, 1, 2), request=column(0, -1, 0, 2)
        ),
        "x": poisoned(x, device=device),
        "weight": in_blocks(normal("cpu", "float32", size, width) * width**-0.5).to(poisoned(weight).dtype).to(device),
        "kv": cache.poisoned_kv(dtype, device),
        "q": poisoned(q, device=device),
    }
    tensors |= places(tensors["rows"], cache.tables("cpu"), head_dim // 2, cache.block_size)
    used = [row for row, slot in enumerate(slots) if slot >= 0]
    tensors["x"][torch.tensor(used, device=device)] = normal(device, dtype, len(used), width, seed=1)
    return Case(launch, tensors, cache.values)
