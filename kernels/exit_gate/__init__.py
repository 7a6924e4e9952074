"""Ends a loop: the exit gate, its probability, the normalised hidden state and the next loop's number."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="exit_gate",
    contract=1,
    writes=("hidden", "row_state", "gate_logits", "exit_probability"),
    tolerance=Tolerance(
        absolute={"bfloat16": 0.0, "float16": 0.0, "float32": 2e-5},
        relative={"bfloat16": 0.0, "float16": 0.0, "float32": 1e-5},
        reason="the dot product of the gate is taken in another order; the hidden state is a copy",
    ),
    weights=(
        "weight",
        "bias",
    ),
    updates=("gate_logits",),
)


def exit_gate(
    part: Part,
    *,
    rows: Buffer,
    x: Buffer,
    weight: Buffer,
    bias: Buffer,
    hidden: Buffer,
    row_state: Buffer,
    gate_logits: Buffer,
    exit_probability: Buffer,
) -> Launch:
    """For row i in loop u: its gate's logit and exit probability, `hidden[slot] = x[i]`, and its state enters loop u + 1.

    rows int32 [bucket, RECORD]; x [bucket, size], hidden [slots, size], weight of `size` and bias of 1 element, of one
    type; row_state int32 [slots, RECORD]; gate_logits and exit_probability float32 [slots, loops], of which column u is
    written. The logit is float32, never rounded to x's type. With lambda = sigmoid(logit), p_u = lambda_u times the product
    of 1 - lambda_j over the loops j < u, whose logits are read from gate_logits; the last loop takes that product whole.
    """
    bucket, size = x.sizes
    block = next_power_of_2(size)
    return KERNEL.launch(
        part,
        grid=(bucket, 1, 1),
        arguments={
            "rows": rows,
            "x": x,
            "weight": weight,
            "bias": bias,
            "hidden": hidden,
            "row_state": row_state,
            "gate_logits": gate_logits,
            "exit_probability": exit_probability,
        },
        constants={"SIZE": size, "LOOPS": gate_logits.sizes[1], "BLOCK": block},
        options=Options(num_warps=min(8, max(1, block // 256)), num_stages=1),
    )
