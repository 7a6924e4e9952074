"""A linear layer over many rows: tiled matrix multiplication."""

from __future__ import annotations

from typing import NamedTuple

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.parts import KIB, Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div
from ouro_build.kernels.tensor_cores import leaves_registers

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


class Tile(NamedTuple):
    """Output rows and columns of one program, the step along K, and its warps."""

    m: int
    n: int
    k: int
    warps: int


_WIDEST = (Tile(256, 128, 64, 8), Tile(128, 256, 64, 8))
_TENSOR_CORE_TILES = (
    Tile(128, 128, 64, 8),
    Tile(64, 128, 64, 4),
    Tile(64, 64, 64, 4),
    Tile(64, 32, 128, 4),
)
_FLOAT32_TILES = (Tile(64, 64, 32, 4), Tile(32, 64, 32, 4), Tile(16, 64, 32, 4))
# Products that take as long as reading one element of an operand into shared memory.
_OPERAND_COST = 64
_GROUP = 8
_MIN_STAGES, _MAX_STAGES = 3, 4
# Kept free in shared memory for barriers and the output's change of layout.
_RESERVE = 2 * KIB


def linear_many(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool) -> Launch:
    """See `linear`."""
    bucket, size, width = rows.sizes[0], out.sizes[1], x.sizes[1]
    tile, stages = _configuration(part, bucket, size, weight.dtype)
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
        options=Options(num_warps=tile.warps, num_stages=stages),
    )


def _configuration(part: Part, bucket: int, size: int, dtype: str) -> tuple[Tile, int]:
    """The tile with the least estimated time, with as many stages as fit in shared memory."""
    tiles = _FLOAT32_TILES if dtype == "float32" else _TENSOR_CORE_TILES
    if dtype != "float32" and leaves_registers(part):
        tiles = (*_WIDEST, *tiles)
    fitting = [t for t in tiles if t.m <= max(bucket, tiles[-1].m) and _stages(part, t, dtype) >= _MIN_STAGES]
    tile = min(fitting, key=lambda t: _cost(part, t, bucket, size))
    return tile, _stages(part, tile, dtype)


def _cost(part: Part, tile: Tile, bucket: int, size: int) -> int:
    """Rounds of one program a multiprocessor, each for a tile's products and the operands it reads."""
    rounds = ceil_div(ceil_div(bucket, tile.m) * ceil_div(size, tile.n), part.sm_count)
    return rounds * (tile.m * tile.n + _OPERAND_COST * (tile.m + tile.n))


def _stages(part: Part, tile: Tile, dtype: str) -> int:
    stage = (tile.m + tile.n) * tile.k * DTYPES[dtype].bytes
    return min(_MAX_STAGES, (part.shared - _RESERVE) // stage)
