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
    wait(PROGRAMMATIC)
    row = tl.program_id(0)
    record = rows + row * 8
    if tl.load(record) >= 0:
        heads = tl.num_programs(1)
        row_head = row.to(tl.int64) * heads + tl.program_id(1)
        d = tl.arange(0, HEAD_DIM)
        slot = slot_of(record, SLOTS)
        count = 0
        if slot >= 0:
            count = count_of(record, slot, reference_records, layer, LAYERS, CAPACITY)
        mode = tl.load(record + 4)
        if not CAPTURES:
            mode = mode * 0 + 2
        if not CONSUMES:
            mode = mode * 0 + 1
        if count > 0:
            split = tl.arange(0, SPLIT_TILE)
            at = sums + (row_head * SPLITS + split) * 2
            maximum = tl.load(at, mask=split < SPLITS, other=float("-inf"))
            total = tl.load(at + 1, mask=split < SPLITS, other=0.0)
            # The first split is never empty, so the largest maximum is a number and an empty split's share is 0.
            share = tl.exp(maximum - tl.max(maximum, 0))
            parts = tl.load(
                partial + (row_head * SPLITS + split)[:, None] * HEAD_DIM + d[None, :], mask=(total > 0)[:, None], other=0.0
            )  # fmt: skip
            y = tl.sum(parts * share[:, None], 0) / tl.sum(total * share, 0)
            place = (slot.to(tl.int64) * LAYERS + layer) * heads + tl.program_id(1)
            output = reference_output + place * HEAD_DIM + d
            contribution = reference_contribution + place * HEAD_DIM + d
            if mode == 1:
                if CAPTURES:
                    tl.store(output, tl.load(attended + row_head * HEAD_DIM + d).to(tl.float32))
                    tl.store(contribution, y)
            else:
                if CONSUMES:
                    corrected = tl.load(output) + tl.load(reference_mass + place) * (y - tl.load(contribution))
                    tl.store(out + row_head * HEAD_DIM + d, corrected.to(out.dtype.element_ty))
        elif CONSUMES:
            lost = tl.full((HEAD_DIM,), float("nan"), tl.float32)
            tl.store(out + row_head * HEAD_DIM + d, lost.to(out.dtype.element_ty), mask=d < tl.where(mode == 1, 0, HEAD_DIM))
