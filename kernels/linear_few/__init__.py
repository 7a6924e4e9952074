"""A linear layer over few rows, where the time is that of reading the weights once."""

from __future__ import annotations

from ouro_build.artifacts.blocks import BLOCK_COLUMNS
from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Constant, Launch, Options
from ouro_build.artifacts.tuning import Fragments
from ouro_build.kernels.sites import Site, matrix_site
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2
from ouro_build.kernels.tuning import tuning_of

KERNEL = Kernel(
    name="linear_few",
    contract=2,
    writes=("out",),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-4, "float16": 1e-4, "float32": 2e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 2e-5},
        reason="float32 sums of K products in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
    weights=("weight",),
)

_LOAD_BYTES = 16


def linear_few(part: Part, *, rows: Buffer, x: Buffer, weight: Buffer, out: Buffer, gather: bool) -> Launch:
    """See `linear`. float32 takes any number of rows by multiply-adds; registers bound it to about 8.

    Without `gather`, inactive rows of `out` are written too: with what their `x` makes of them.
    """
    bucket, size, width = rows.sizes[0], out.sizes[1], x.sizes[1]
    if weight.dtype == "float32":
        block, constants, options = _products(bucket, width, weight.dtype)
    else:
        shape = fragment_shape(part, matrix_site(KERNEL.name, bucket, size, width, weight.dtype))
        constants, options = fragment_options(shape, bucket, width)
        block, constants = shape.block_n, {"VECTOR": 1, **constants}
    return KERNEL.launch(
        part,
        grid=(ceil_div(size, block), 1, 1),
        arguments={"rows": rows, "x": x, "weight": weight, "out": out},
        constants={"ROWS": bucket, "N": size, "K": width, "GATHER": gather, "BLOCK_N": block, **constants},
        options=options,
    )


def _products(bucket: int, width: int, dtype: str) -> tuple[int, dict[str, Constant], Options]:
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


def fragment_shape(part: Part, site: Site) -> Fragments:
    """The configuration for a matrix and a number of rows, by the part's tables."""
    found = tuning_of(part).parameters(site, Fragments)
    return reasoned_fragments(site.rows) if found is None else found


def reasoned_fragments(bucket: int) -> Fragments:
    """Where no table has an entry: 8 warps of one fragment a step, as many steps ahead as leave the registers of half a
    multiprocessor, of which sums of all rows and the activations on their way take a share."""
    tile = max(8, next_power_of_2(bucket))
    return Fragments(block_n=16, warps=8, step=32, ahead=max(1, 64 // tile), x_ahead=max(1, 32 // tile), maxnreg=128)


def fragment_options(shape: Fragments, bucket: int, width: int) -> tuple[dict[str, Constant], Options]:
    """Constants of the loop over the width, in smaller steps where it has less than one of the shape's for each warp."""
    step = min(shape.step, max(32, next_power_of_2(ceil_div(width, shape.warps))))
    steps = ceil_div(width, shape.warps * step)
    constants: dict[str, Constant] = {
        "BLOCK_K": step,
        "ROW_TILE": next_power_of_2(bucket),
        "AHEAD": min(shape.ahead, steps),
        "X_AHEAD": min(shape.x_ahead, steps),
        "K_WARPS": shape.warps,
    }
    return constants, Options(num_warps=shape.warps, num_stages=1, maxnreg=shape.maxnreg, carveout=shape.carveout)
