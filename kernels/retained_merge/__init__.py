"""Joins the splits of `attention_retained`: a capturing row's contribution is stored, a consuming row's output corrected."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Argument, Buffer, Constant, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="retained_merge",
    contract=1,
    writes=("reference_contribution", "out"),
    tolerance=Tolerance(
        absolute={"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-5},
        relative={"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5},
        reason="the splits are summed in another order; near a rounding boundary a half-width result may be the neighbour",
    ),
    updates=("reference_contribution",),
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
    out: Buffer | None,
    layer: int,
    captures: bool,
) -> Launch:
    """With A the merged splits, as in `attention_merge`: of a row that captures, A is stored as its slot's contribution C at
    `layer`; of one that consumes, `out[i] = O + m * (A - C)` with the slot's output O, mass m and contribution C.

    Where `captures` is false all rows consume, where `out` is None all capture; with both, those of mode CAPTURE capture. A row
    that consumes and whose slot holds nothing of its own gets NaN; one that captures is left out then.

    rows int32 [bucket, RECORD], partial float32 [bucket, heads, splits, head_dim], sums float32 [bucket, heads, splits, 2],
    reference_records, reference_keys, reference_mass and reference_output as in `attention_select`, reference_contribution
    float32 [slots, layers, heads, head_dim], out [bucket, heads * head_dim].
    """
    bucket, heads, splits, head_dim = partial.sizes
    slots, layers, _, capacity = reference_keys.sizes
    tile = next_power_of_2(splits)
    arguments: dict[str, Argument] = {
        "rows": rows,
        "partial": partial,
        "sums": sums,
        "reference_records": reference_records,
        "reference_mass": reference_mass,
        "reference_output": reference_output,
        "reference_contribution": reference_contribution,
    }
    absent: dict[str, Constant] = {"out": None} if out is None else {}
    return KERNEL.launch(
        part,
        grid=(bucket, heads, 1),
        arguments={**arguments, **({} if out is None else {"out": out}), "layer": layer},
        constants={
            **absent,
            "SLOTS": slots,
            "LAYERS": layers,
            "CAPACITY": capacity,
            "CAPTURES": captures,
            "CONSUMES": out is not None,
            "SPLITS": splits,
            "SPLIT_TILE": tile,
            "HEAD_DIM": head_dim,
        },
        options=Options(num_warps=max(1, min(8, tile * head_dim // 1024)), num_stages=1, fusion=False),
    )
