"""A linear layer over few rows, where the time is that of reading the weights once."""

from __future__ import annotations

from typing import NamedTuple

from ouro_build.artifacts.blocks import BLOCK_COLUMNS
from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Constant, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

KERNEL = Kernel(
    name="linear_few",
    contract=2,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-4, "float16": 1e-4, "float32": 2e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 2e-5},
        reason="float32 sums of K products in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
    early=("weight",),
)

_LOAD_BYTES = 16


class Shape(NamedTuple):
    """How a program on the tensor cores works: weight rows, warps (the width is split over them), elements of the width a
    warp takes in one step, steps whose weights and activations are loaded ahead, registers a thread (0: the compiler's).

    Left alone, ptxas aims at more programs a multiprocessor than the loads in flight leave room for, and orders the loads to
    save registers.
    """

    block_n: int
    warps: int
    step: int
    ahead: int
    x_ahead: int
    maxnreg: int


# By tile of rows and kind of matrix. Found on an H200 for the projections of the 1.4B model in one chain; for more than 8 rows
# by whole decode steps. Up to 8 rows the narrower matrices load all that a program reads before they wait.
_SHAPES: dict[int, dict[str, Shape]] = {
    8: {
        "middle": Shape(16, 4, 512, 1, 1, 168),
        "narrow": Shape(16, 8, 256, 1, 1, 128),
        "tall": Shape(32, 4, 32, 4, 4, 168),
        "deep": Shape(16, 8, 64, 6, 6, 168),
    },
    16: {
        "middle": Shape(16, 4, 64, 4, 2, 168),
        "narrow": Shape(16, 8, 32, 8, 6, 168),
        "tall": Shape(32, 4, 64, 2, 1, 168),
        "deep": Shape(16, 8, 32, 10, 4, 168),
    },
    32: {
        "middle": Shape(32, 4, 32, 4, 1, 168),
        "narrow": Shape(16, 8, 32, 8, 2, 168),
        "tall": Shape(32, 4, 32, 4, 1, 168),
        "deep": Shape(16, 8, 32, 8, 2, 168),
    },
}
_TALL, _NARROW = 8192, 4096


def linear_few(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool) -> Launch:
    """See `linear`. float32 takes any number of rows by multiply-adds; registers bound it to about 8.

    Without `gather`, inactive rows of `out` are written too: with what their `x` makes of them.
    """
    bucket, size, width = rows.sizes[0], out.sizes[1], x.sizes[1]
    choose = _products if weight.dtype == "float32" else _fragments
    block, constants, options = choose(bucket, size, width, weight.dtype)
    return KERNEL.launch(
        part,
        grid=(ceil_div(size, block), 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, "out": out},
        constants={"ROWS": bucket, "N": size, "K": width, "GATHER": gather, "BLOCK_N": block, **constants},
        options=options,
    )


def _products(bucket: int, size: int, width: int, dtype: str) -> tuple[int, dict[str, Constant], Options]:
    """Multiply-adds: each program takes a few weight rows over the whole width, its warps side by side along it."""
    vector = _LOAD_BYTES // DTYPES[dtype].bytes
    warps = 4 if width >= 4 * 32 * vector else 1
    block_k = max(BLOCK_COLUMNS, min(warps * 32 * vector, next_power_of_2(width)))
    block = 4 if bucket <= 2 else 2
    constants: dict[str, Constant] = {
        "BLOCK_K": block_k,
        "VECTOR": vector,
        "ROW_TILE": next_power_of_2(bucket),
        "AHEAD": min(4, ceil_div(width, block_k)),
        "X_AHEAD": 1,
        "K_WARPS": 0,
    }
    return block, constants, Options(num_warps=warps, num_stages=1)


def _fragments(bucket: int, size: int, width: int, dtype: str) -> tuple[int, dict[str, Constant], Options]:
    """Tensor cores, in the shape of the matrix's kind."""
    shape = fragment_shape(bucket, size, width)
    constants, options = fragment_options(shape, bucket, width)
    return shape.block_n, {"VECTOR": 1, **constants}, options


def fragment_shape(bucket: int, size: int, width: int) -> Shape:
    """The shape for a matrix [size, width] and up to 32 rows."""
    return _SHAPES[_row_tile(bucket)][_kind(size, width)]


def fragment_options(shape: Shape, bucket: int, width: int) -> tuple[dict[str, Constant], Options]:
    """Constants of the loop over the width, in smaller steps where it has less than one of the shape's for each warp."""
    step = min(shape.step, max(32, next_power_of_2(ceil_div(width, shape.warps))))
    steps = ceil_div(width, shape.warps * step)
    constants: dict[str, Constant] = {
        "BLOCK_K": step,
        "ROW_TILE": _row_tile(bucket),
        "AHEAD": min(shape.ahead, steps),
        "X_AHEAD": min(shape.x_ahead, steps),
        "K_WARPS": shape.warps,
    }
    return constants, Options(num_warps=shape.warps, num_stages=1, maxnreg=shape.maxnreg)


def _row_tile(bucket: int) -> int:
    return max(8, next_power_of_2(bucket))


def _kind(size: int, width: int) -> str:
    if size >= _TALL:
        return "tall"
    if width > _NARROW:
        return "deep"
    return "narrow" if size <= _NARROW else "middle"
