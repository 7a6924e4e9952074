from ouro_build.kernels.exit_gate import exit_gate
from tests.kernel_cases import PART, SLOTS, Case, ints, normal
from tests.kernel_harness import buffer, poisoned, row_records

SIZES = (16, 96, 640)
LOOPS = 4


def case(dtype: str, device: str = "cpu", size: int = 96) -> Case:
    """Rows in every loop, and a hole. Earlier loops have logits, later ones are poisoned."""
    slots, loop = [3, 0, -1, 5, 1], [0, 3, -1, 1, 2]
    hidden = buffer("hidden", dtype, SLOTS, size)
    per_loop = buffer("gate_logits", "float32", SLOTS, LOOPS)
    launch = exit_gate(
        PART,
        rows=buffer("rows", "int32", len(loop), 8),
        x=buffer("x", dtype, len(loop), size),
        weight=buffer("weight", dtype, 1, size),
        bias=buffer("bias", dtype, 1),
        hidden=hidden,
        row_state=buffer("row_state", "int32", SLOTS, 8),
        gate_logits=per_loop,
        exit_probability=per_loop,
    )
    logits = poisoned(per_loop, device=device)
    for slot, u in zip(slots, loop, strict=True):
        logits[slot, : max(u, 0)] = normal(device, "float32", max(u, 0), seed=slot)
    tensors = {
        "rows": row_records(slots, device, loop=loop),
        "x": normal(device, dtype, len(loop), size),
        "weight": normal(device, dtype, 1, size, seed=1) / size**0.5,
        "bias": normal(device, dtype, 1, seed=2),
        "hidden": poisoned(hidden, device=device),
        "row_state": ints(device, [[100 * slot + column for column in range(8)] for slot in range(SLOTS)]),
        "gate_logits": logits,
        "exit_probability": poisoned(per_loop, device=device),
    }
    return Case(launch, tensors)
