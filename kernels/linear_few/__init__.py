"""A linear layer over few rows, where the time is that of reading the weights once."""

from __future__ import annotations

from typing import NamedTuple

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Constant, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

KERNEL = Kernel(
    name="linear_few",
    contract=1,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-4, "float16": 1e-4, "float32": 2e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 2e-5},
        reason="float32 sums of K products in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
    early=("weight",),
)

_VECTOR = 4  # float32 elements of one load


class Shape(NamedTuple):
    """How programs on the tensor cores work: weight rows of a tile, warps (the width is split over them), elements of the
    width a warp takes in one step, steps whose weights and activations are loaded ahead, registers a thread (0: the
    compiler's), programs a multiprocessor that share the tiles.

    Left alone, ptxas aims at more programs a multiprocessor than the loads in flight leave room for, and orders the loads to
    save registers. Programs that leave half of the registers to the next launch let it load its first weights while they end.
    """

    block_n: int
    warps: int
    step: int
    ahead: int
    x_ahead: int
    maxnreg: int
    programs: int


# By tile of rows and kind of matrix.
_SHAPES: dict[int, dict[str, Shape]] = {
    8: {
        "middle": Shape(16, 4, 512, 1, 1, 168, 99),
        "narrow": Shape(16, 8, 256, 1, 1, 128, 99),
        "tall": Shape(32, 4, 32, 4, 4, 168, 99),
        "deep": Shape(16, 8, 64, 6, 6, 168, 99),
    },
    16: {
        "middle": Shape(16, 4, 64, 4, 2, 168, 99),
        "narrow": Shape(16, 8, 32, 8, 6, 168, 99),
        "tall": Shape(32, 4, 64, 2, 1, 168, 99),
        "deep": Shape(16, 8, 32, 10, 4, 168, 99),
    },
    32: {
        "middle": Shape(32, 4, 32, 4, 1, 168, 99),
        "narrow": Shape(16, 8, 32, 8, 2, 168, 99),
        "tall": Shape(32, 4, 32, 4, 1, 168, 99),
        "deep": Shape(16, 8, 32, 8, 2, 168, 99),
    },
}
_MOST_TILES = 8  # of a program: its code has them one after another
_TALL, _NARROW = 8192, 4096


def linear_few(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool) -> Launch:
    """See `linear`. float32 takes any number of rows by multiply-adds; registers bound it to about 8.

    Without `gather`, inactive rows of `out` are written too: with what their `x` makes of them.
    """
    bucket, (size, width) = rows.sizes[0], weight.sizes
    if weight.dtype == "float32":
        programs, constants, options = _products(bucket, size, width)
    else:
        shape = fragment_shape(bucket, size, width)
        programs, constants, options = fragment_options(part, shape, bucket, width, ceil_div(size, shape.block_n))
        constants = {"BLOCK_N": shape.block_n, "VECTOR": 1, **constants}
    return KERNEL.launch(
        part,
        grid=(programs, 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, "out": out},
        constants={"ROWS": bucket, "N": size, "K": width, "GATHER": gather, **constants},
        options=options,
    )


def _products(bucket: int, size: int, width: int) -> tuple[int, dict[str, Constant], Options]:
    """Multiply-adds: each program takes a few weight rows over the whole width, its warps side by side along it."""
    warps = 4 if width >= 4 * 32 * _VECTOR else 1
    block_k = max(_VECTOR, min(warps * 32 * _VECTOR, next_power_of_2(width)))
    block = 4 if bucket <= 2 else 2
    constants: dict[str, Constant] = {
        "BLOCK_N": block,
        "VECTOR": _VECTOR,
        "BLOCK_K": block_k,
        "ROW_TILE": next_power_of_2(bucket),
        "AHEAD": min(4, ceil_div(width, block_k)),
        "X_AHEAD": 1,
        "K_WARPS": 0,
        "TILES": 1,
    }
    return ceil_div(size, block), constants, Options(num_warps=warps, num_stages=1)


def fragment_shape(bucket: int, size: int, width: int) -> Shape:
    """The shape for a matrix [size, width] and up to 32 rows."""
    return _SHAPES[_row_tile(bucket)][_kind(size, width)]


def fragment_options(part: Part, shape: Shape, bucket: int, width: int, tiles: int) -> tuple[int, dict[str, Constant], Options]:
    """Programs that share `tiles` tiles of weight rows, and the constants of their loops, which take smaller steps where the
    width has less than one of the shape's for each warp."""
    step = min(shape.step, max(32, next_power_of_2(ceil_div(width, shape.warps))))
    steps = ceil_div(width, shape.warps * step)
    each = min(_MOST_TILES, ceil_div(tiles, shape.programs * part.sm_count))
    constants: dict[str, Constant] = {
        "BLOCK_K": step,
        "ROW_TILE": _row_tile(bucket),
        "AHEAD": min(shape.ahead, steps),
        "X_AHEAD": min(shape.x_ahead, steps),
        "K_WARPS": shape.warps,
        "TILES": each,
    }
    return ceil_div(tiles, each), constants, Options(num_warps=shape.warps, num_stages=1, maxnreg=shape.maxnreg)


def _row_tile(bucket: int) -> int:
    return max(8, next_power_of_2(bucket))


def _kind(size: int, width: int) -> str:
    if size >= _TALL:
        return "tall"
    if width > _NARROW:
        return "deep"
    return "narrow" if size <= _NARROW else "middle"
