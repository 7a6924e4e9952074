import torch

from ouro_build.kernels.kv_copy import kv_copy
from tests.kernel_cases import PART, Case, normal
from tests.kernel_cases.paged import TABLES, Cache, far_kv, far_planes, in_order, start_of
from tests.kernel_harness import buffer, row_records, run_reference, run_source

# (kv_heads, head_dim): one block of elements, several, and sizes that are no power of two
SHAPES = ((2, 16), (3, 32), (20, 64))


def case(
    dtype: str,
    device: str = "cpu",
    shape: tuple[int, int] = (2, 16),
    cache: Cache | None = None,
    kv: torch.Tensor | None = None,
) -> Case:
    """Rows that ran one and three loops, a hole, one that ran all and one that ran none. `kv`: instead of a random one."""
    cache = cache or Cache(kv_heads=shape[0], head_dim=shape[1])
    launch = kv_copy(
        PART,
        rows=buffer("rows", "int32", 5, 8),
        block_tables=cache.tables_buffer(),
        kv=cache.kv_buffer(dtype),
        layers=cache.layers,
        loops=cache.loops,
    )
    rows = row_records([6, -1, 0, 2, 1], device, position=[2, -1, 11, 5, 8], loop=[1, -1, 3, 4, 0], request=[0, -1, 0, 2, 0])
    kv = in_order(normal(device, dtype, *cache.kv_shape), cache.blocks_outer) if kv is None else kv
    return Case(launch, {"rows": rows, "block_tables": cache.tables(device), "kv": kv}, cache.values)


def check_far_planes(device: str) -> None:
    """Source and reference copy into the last planes of a cache of more than 2^31 elements."""
    cache = far_planes()
    for run in (run_source, run_reference):
        kv = far_kv(cache, device)
        pool = start_of(kv) if run is run_source else kv
        made = case("float16", device, cache=cache, kv=pool)
        kept = kv[2 * cache.layers : 3 * cache.layers, TABLES[0][0], :, :, 11]
        kept += 1.0
        run(made.launch, made.tensors, made.values)
        assert kv[3 * cache.layers :, TABLES[0][0], :, :, 11].equal(kept)
