"""A linear layer over few rows, where the time is that of reading the weights once."""

from __future__ import annotations

from ouro_build.artifacts.dtypes import DTYPES
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
)

# One program's weights in flight, 16 bytes a thread and load. Row counts up to PRODUCT_ROWS go through ordinary
# multiply-adds, which need no operand layout; more go to the tensor cores, whose fragments the loads fill directly.
PRODUCT_ROWS = 4
_LOAD_BYTES = 16


def linear_few(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool) -> Launch:
    """See `linear`. float32 takes any number of rows by multiply-adds; registers bound it to about 8."""
    bucket, (size, width) = rows.sizes[0], weight.sizes
    tensor_cores = bucket > PRODUCT_ROWS and weight.dtype != "float32"
    choose = _fragments if tensor_cores else _products
    block, constants, options = choose(bucket, size, width, weight.dtype)
    return KERNEL.launch(
        grid=(ceil_div(size, block), 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, "out": out},
        constants={"ROWS": bucket, "N": size, "K": width, "GATHER": gather, "BLOCK_N": block, **constants},
        options=options,
    )


def _products(bucket: int, size: int, width: int, dtype: str) -> tuple[int, dict[str, Constant], Options]:
    """Multiply-adds: each program takes a few weight rows over the whole width, its warps side by side along it."""
    vector = _LOAD_BYTES // DTYPES[dtype].bytes
    warps = 4 if width >= 4 * 32 * vector else 1
    block_k = max(vector, min(warps * 32 * vector, next_power_of_2(width)))
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
    """Tensor cores: 16 weight rows a program, the width split over its warps.

    Left alone, ptxas aims at more programs a multiprocessor than the loads in flight leave room for, and orders the loads
    to save registers: hence `maxnreg`, as measured on an H200.
    """
    warps = 8 if width >= 2048 and size <= 4096 else 4
    group = 64 if width >= 64 * warps else 32
    steps = ceil_div(width, warps * group)
    constants: dict[str, Constant] = {
        "BLOCK_K": group,
        "VECTOR": 1,
        "ROW_TILE": max(8, next_power_of_2(bucket)),
        "AHEAD": min(4, steps),
        "X_AHEAD": min(2 if bucket <= 16 else 1, steps),
        "K_WARPS": warps,
    }
    return 16, constants, Options(num_warps=warps, num_stages=1, maxnreg=128 if bucket <= 8 else 168)
