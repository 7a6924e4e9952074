"""Triton source of `retained_merge`: one program a (row, head)."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.references.source import count_of, slot_of


@triton.jit
def retained_merge(
    rows, partial, sums, reference_records, reference_mass, reference_output, reference_contribution, attended,
    out, layer, SLOTS: tl.constexpr, LAYERS: tl.constexpr, CAPACITY: tl.constexpr, CAPTURES: tl.constexpr,
    CONSUMES: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    row = tl.program_id(0)
    record = rows + row * 8
    active = tl.load(record, cache_modifier=".cg") >= 0
    slot = slot_of(record, SLOTS)
    count = count_of(record, slot, reference_records, layer, LAYERS, CAPACITY)
    mode = tl.load(record + 4, cache_modifier=".cg")
    if not CAPTURES:
        mode = mode * 0 + 2
    if not CONSUMES:
        mode = mode * 0 + 1
    wait(PROGRAMMATIC)
    if active:
        heads = tl.num_programs(1)
        row_head = row.to(tl.int64) * heads + tl.program_id(1)
        d = tl.arange(0, HEAD_DIM)
        if count > 0:
            split = tl.arange(0, SPLIT_TILE)
            at = sums + (row_head * SPLITS + split) * 2
            maximum = tl.load(at, mask=split < SPLITS, other=float("-inf"))
            total = tl.load(at + 1, mask=split < SPLITS, other=0.0)
            # What is kept is asked for beside the splits. An empty split's share holds anything.
            place = (slot.to(tl.int64) * LAYERS + layer) * heads + tl.program_id(1)
            output = reference_output + place * HEAD_DIM + d
            contribution = reference_contribution + place * HEAD_DIM + d
            if CONSUMES:
                kept = tl.load(output)
                part_kept = tl.load(contribution)
                mass = tl.load(reference_mass + place)
            parts = tl.load(
                partial + (row_head * SPLITS + split)[:, None] * HEAD_DIM + d[None, :], mask=(split < SPLITS)[:, None],
                other=0.0,
            )  # fmt: skip
            # The first split is never empty, so the largest maximum is a number and an empty split's share is 0.
            share = tl.exp(maximum - tl.max(maximum, 0))
            y = tl.sum(tl.where((total > 0)[:, None], parts * share[:, None], 0.0), 0) / tl.sum(total * share, 0)
            if mode == 1:
                if CAPTURES:
                    tl.store(output, tl.load(attended + row_head * HEAD_DIM + d).to(tl.float32))
                    tl.store(contribution, y)
            else:
                if CONSUMES:
                    corrected = kept + mass * (y - part_kept)
                    tl.store(out + row_head * HEAD_DIM + d, corrected.to(out.dtype.element_ty))
        elif CONSUMES:
            lost = tl.full((HEAD_DIM,), float("nan"), tl.float32)
            tl.store(out + row_head * HEAD_DIM + d, lost.to(out.dtype.element_ty), mask=d < tl.where(mode == 1, 0, HEAD_DIM))
