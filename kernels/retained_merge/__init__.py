"""Joins the splits of `attention_retained`: a capturing row's output and contribution are kept, a consuming row's corrected."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Argument, Buffer, Constant, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="retained_merge",
    contract=2,
    writes=("reference_output", "reference_contribution", "out"),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5},
        reason="the splits are summed in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
    early=("rows", "reference_records"),
    updates=("reference_output", "reference_contribution"),
    layered=("reference_records", "reference_mass", "reference_output", "reference_contribution"),
)


def retained_merge(
    part: Part,
    *,
    rows: Buffer,
    partial: Buffer,
    sums: Buffer,
    reference_records: Buffer,
    reference_keys: Buffer,
    reference_mass: Buffer,
    reference_output: Buffer,
    reference_contribution: Buffer,
    attended: Buffer | None,
    out: Buffer | None,
    layer: int,
) -> Launch:
    """With A the merged splits, as in `attention_merge`: of a row that captures, `attended[i]` is stored as its slot's output O
    at `layer` and A as its contribution C; of one that consumes, `out[i] = O + m * (A - C)` with its slot's O, mass m and C.

    Where `attended` is None all rows consume, where `out` is None all capture; with both, which may be one buffer, those of
    mode CAPTURE capture. A row that consumes and whose slot holds nothing of its own gets NaN; one that captures is left out
    then. That is one whose slot does not exist: `attention_select` has given every other at least one key.

    rows int32 [bucket, RECORD], partial float32 [bucket, heads, splits, head_dim], sums float32 [bucket, heads, splits, 2],
    reference_records, reference_keys and reference_mass as in `attention_select`, reference_output and reference_contribution
    float32 [slots, layers, heads, head_dim], attended [bucket, heads * head_dim] as `attention_merge` left it, out the same.
    """
    bucket, heads, splits, head_dim = partial.sizes
    slots, layers, _, capacity = reference_keys.sizes
    tile = next_power_of_2(splits)
    buffers = {
        "rows": rows,
        "partial": partial,
        "sums": sums,
        "reference_records": reference_records,
        "reference_mass": reference_mass,
        "reference_output": reference_output,
        "reference_contribution": reference_contribution,
        "attended": attended,
        "out": out,
    }
    arguments: dict[str, Argument] = {name: buffer for name, buffer in buffers.items() if buffer is not None}
    absent: dict[str, Constant] = {name: None for name, buffer in buffers.items() if buffer is None}
    return KERNEL.launch(
        part,
        grid=(bucket, heads, 1),
        arguments={**arguments, "layer": layer},
        constants={
            **absent,
            "SLOTS": slots,
            "LAYERS": layers,
            "CAPACITY": capacity,
            "CAPTURES": attended is not None,
            "CONSUMES": out is not None,
            "SPLITS": splits,
            "SPLIT_TILE": tile,
            "HEAD_DIM": head_dim,
        },
        options=Options(num_warps=max(1, min(8, tile * head_dim // 1024)), num_stages=1, fusion=False),
    )
