import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rope_kv_write import rope_kv_write
from tests.kernel_cases import PART, Case, normal
from tests.kernel_cases.locate import places
from tests.kernel_cases.paged import TABLES, Cache, far_kv, far_planes, long_plane, start_of
from tests.kernel_harness import buffer, poisoned, row_records, run_reference, run_source

# (heads, kv_heads, head_dim): equal and grouped heads, every head size
SHAPES = ((2, 2, 16), (4, 2, 32), (6, 2, 64), (3, 1, 128))
LONG = Cache(layers=1, loops=3, kv_heads=1, block_size=16384)
"""Few but long blocks: the largest position of the model fits."""


def case(
    dtype: str,
    device: str = "cpu",
    shape: tuple[int, int, int] = (4, 2, 32),
    cache: Cache | None = None,
    kv: Tensor | None = None,
    last_position: int = 5,
) -> Case:
    """Two rows of one request in different blocks and loops, a hole, and a row of another request at `last_position`.

    `kv`: instead of a poisoned one.
    """
    heads, kv_heads, head_dim = shape
    cache = cache or Cache(kv_heads=kv_heads, head_dim=head_dim)
    size = (heads + 2 * kv_heads) * head_dim
    q = buffer("q", dtype, 4, heads, head_dim)
    launch = rope_kv_write(
        PART,
        rows=buffer("rows", "int32", 4, 8),
        qkv=buffer("qkv", dtype, 4, size),
        blocks=buffer("blocks", "int32", 4),
        rotation=buffer("rotation", "float32", 4, 2, head_dim // 2),
        kv=cache.kv_buffer(dtype),
        q=q,
        layer=cache.layers - 1,
        layers=cache.layers,
    )
    tensors = {
        "rows": row_records(
            [6, -1, 0, 2], device, position=[0, -1, 11, last_position], loop=[0, -1, 1, 2], request=[0, -1, 0, 2]
        ),
        "qkv": normal(device, dtype, 4, size),
        "kv": cache.poisoned_kv(dtype, device) if kv is None else kv,
        "q": poisoned(q, device=device),
    }
    tensors |= places(tensors["rows"], cache.tables("cpu"), head_dim // 2, cache.block_size)
    return Case(launch, tensors, cache.values)


def check_far_planes(device: str) -> None:
    """Source and reference write the same to the last plane of a cache of more than 2^31 elements."""
    cache = far_planes()
    written = []
    for run in (run_source, run_reference):
        kv = far_kv(cache, device)
        pool = start_of(kv) if run is run_source else kv
        made = case("float16", device, (1, 1, cache.head_dim), cache, pool)
        made.tensors["rows"][3, Row.LOOP] = cache.loops - 1
        run(made.launch, made.tensors, made.values)
        written.append(kv[-1, TABLES[2][0], :, 0, 5].clone())
    assert written[0].count_nonzero() == written[0].numel()
    torch.testing.assert_close(*written)


def check_far_blocks(device: str) -> None:
    """The same for the last block of a plane of more than 2^31 elements."""
    cache = long_plane()
    written = []
    for run in (run_source, run_reference):
        kv = far_kv(cache, device)
        pool = start_of(kv) if run is run_source else kv
        made = case("float16", device, (1, 1, cache.head_dim), cache, pool)
        made.tensors["rows"][:3, Row.SLOT] = -1
        made.tensors["rows"][3, Row.LOOP] = 0
        made.tensors["blocks"][3] = cache.blocks - 1
        run(made.launch, made.tensors, made.values)
        written.append(kv[0, -1, :, 0, 5].clone())
    assert written[0].count_nonzero() == written[0].numel()
    torch.testing.assert_close(*written)
