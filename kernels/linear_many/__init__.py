"""A linear layer over many rows: tiled matrix multiplication."""

from __future__ import annotations

from ouro_build.artifacts.parts import KIB, Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.artifacts.tuning import Tile
from ouro_build.kernels.sites import Site, matrix_site
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div
from ouro_build.kernels.tensor_cores import leaves_registers
from ouro_build.kernels.tuning import tuning_of

KERNEL = Kernel(
    name="linear_many",
    contract=2,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-4, "float16": 1e-4, "float32": 2e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 2e-5},
        reason="float32 sums of K products in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
)


# Where no table has an entry the tile is one of these, by an estimate of its time: (m, n, k, warps) as in `Tile`.
_WIDEST = ((256, 128, 64, 8), (128, 256, 64, 8))
_TENSOR_CORE_TILES = ((128, 128, 64, 8), (64, 128, 64, 4), (64, 64, 64, 4), (64, 32, 128, 4))
_FLOAT32_TILES = ((64, 64, 32, 4), (32, 64, 32, 4), (16, 64, 32, 4))
# Products that take as long as reading one element of an operand into shared memory.
_OPERAND_COST = 64
_GROUP = 8
_MIN_STAGES, _MAX_STAGES = 3, 4
# Kept free in shared memory for barriers and the output's change of layout.
_RESERVE = 2 * KIB


def linear_many(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool) -> Launch:
    """See `linear`."""
    bucket, size, width = rows.sizes[0], out.sizes[1], x.sizes[1]
    tile = tile_shape(part, matrix_site(KERNEL.name, bucket, size, width, weight.dtype))
    return KERNEL.launch(
        part,
        grid=(ceil_div(bucket, tile.m) * ceil_div(size, tile.n), 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, "out": out},
        constants={
            "ROWS": bucket,
            "N": size,
            "K": width,
            "GATHER": gather,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP": _GROUP,
        },
        options=Options(num_warps=tile.warps, num_stages=tile.stages),
    )


def tile_shape(part: Part, site: Site) -> Tile:
    """The configuration for a matrix and a number of rows, by the part's tables."""
    found = tuning_of(part).parameters(site, Tile)
    return reasoned_tile(part, site) if found is None else found


def reasoned_tile(part: Part, site: Site) -> Tile:
    """Where no table has an entry: the tile with the least estimated time, with as many stages as fit in shared memory."""
    shapes = _FLOAT32_TILES if site.bits == 32 else _TENSOR_CORE_TILES
    if site.bits != 32 and leaves_registers(part):
        shapes = (*_WIDEST, *shapes)
    tiles = [_staged(part, shape, site.bits // 8) for shape in shapes]
    fitting = [t for t in tiles if t.m <= max(site.rows, tiles[-1].m) and t.stages >= _MIN_STAGES]
    return min(fitting, key=lambda t: _cost(part, t, site.rows, site.sizes[0]))


def _staged(part: Part, shape: tuple[int, int, int, int], element: int) -> Tile:
    m, n, k, warps = shape
    stages = (part.shared - _RESERVE) // ((m + n) * k * element)
    return Tile(m=m, n=n, k=k, warps=warps, stages=min(_MAX_STAGES, stages))


def _cost(part: Part, tile: Tile, bucket: int, size: int) -> int:
    """Rounds of one program a multiprocessor, each for a tile's products and the operands it reads."""
    rounds = ceil_div(ceil_div(bucket, tile.m) * ceil_div(size, tile.n), part.sm_count)
    return rounds * (tile.m * tile.n + _OPERAND_COST * (tile.m + tile.n))
