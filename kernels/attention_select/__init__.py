"""Chooses the keys that a capturing row retains, and remembers them with their share of the attention."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, next_power_of_2

KERNEL = Kernel(
    name="attention_select",
    contract=2,
    writes=("reference_records", "reference_mass", "reference_keys"),
    tolerance=Tolerance(
        absolute={"float32": 1e-5},
        relative={"float32": 1e-4},
        reason="exponentials in float32, summed in another order; the keys are equal",
    ),
    layered=("reference_records", "reference_mass", "reference_keys"),
)

# All scores of a head are searched where they lie, in registers; those of a longer context are read in every pass.
_HELD_A_THREAD = 32
# Scores a thread takes at once when what was chosen is written down.
_WRITTEN_A_THREAD = 4
# Splits that are joined, at least: with fewer some compilers order the rest so that 1,024 threads spill.
_SPLIT_TILE = 32
# Threads of a program: two programs a multiprocessor hide each other's waits; where there is but one, it has all of it.
_LEAST_THREADS, _THREADS, _THREADS_ALONE = 128, 512, 1024
# Registers of a thread of which there are `_THREADS`: two programs have room, without spills. ptxas for 10.x spills with 64.
_REGISTERS, _REGISTERS_10 = 64, 80


def attention_select(
    part: Part,
    *,
    rows: Buffer,
    counts: Buffer,
    scores: Buffer,
    sums: Buffer,
    retained_counts: Buffer,
    reference_records: Buffer,
    reference_mass: Buffer,
    reference_keys: Buffer,
    layer: int,
) -> Launch:
    """In every row's reference slot, at `layer`: its retained keys, their mass, and that they are there.

    The n = position + 1 scores of a head leave `retained_counts[n]` keys: those of the largest scores, of equal ones the first,
    in ascending order. Their mass is the sum of exp(score - M) / the sum of the same over all n, M the largest.

    rows int32 [bucket, RECORD], counts int32 [bucket] as `split_contexts` left it for them, scores float32 [bucket, heads,
    contexts] and sums float32 [bucket, heads, most, 2], of which the first counts[i] splits count, as `attention_capture` left
    them, retained_counts int32 [contexts + 1], reference_records int32 [slots, layers, 2] (`ReferenceRecord`), reference_mass
    float32 [slots, layers, heads], reference_keys int32 [slots, layers, heads, capacity]. A row whose reference slot does not
    exist writes nothing. Past the count the keys stay as they were.
    """
    bucket, heads, width = scores.sizes
    slots, layers, _, capacity = reference_keys.sizes
    most = sums.sizes[2]
    most_threads = _THREADS_ALONE if bucket * heads <= part.sm_count else _THREADS
    threads = min(most_threads, max(_LEAST_THREADS, next_power_of_2(width) // _HELD_A_THREAD))
    return KERNEL.launch(
        part,
        grid=(bucket, heads, 1),
        arguments={
            "rows": rows,
            "counts": counts,
            "scores": scores,
            "sums": sums,
            "retained_counts": retained_counts,
            "reference_records": reference_records,
            "reference_mass": reference_mass,
            "reference_keys": reference_keys,
            "layer": layer,
        },
        constants={
            "SLOTS": slots,
            "LAYERS": layers,
            "HEADS": heads,
            "CAPACITY": capacity,
            "SCORES": width,
            "MOST": most,
            "SPLIT_TILE": max(_SPLIT_TILE, next_power_of_2(most)),
            "TILE": threads * _WRITTEN_A_THREAD,
            "HELD": threads * _HELD_A_THREAD,
        },
        options=Options(num_warps=threads // 32, num_stages=1, maxnreg=_registers(part, threads)),
    )


def _registers(part: Part, threads: int) -> int:
    """What a thread may have; 0 leaves it to the compiler."""
    if threads != _THREADS:
        return 0
    return _REGISTERS_10 if part.capability // 10 == 10 else _REGISTERS
