"""Triton source of `attention_merge`: one program a (row, head)."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def attention_merge(
    rows, partial, sums, out, SPLITS: tl.constexpr, SPLIT_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0)
    slot = tl.load(rows + row * 8)
    if slot >= 0:
        head = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        split = tl.arange(0, SPLIT_TILE)
        d = tl.arange(0, HEAD_DIM)
        at = sums + (head * SPLITS + split) * 2
        maximum = tl.load(at, mask=split < SPLITS, other=float("-inf"))
        total = tl.load(at + 1, mask=split < SPLITS, other=0.0)
        # The first split is never empty, so the largest maximum is a number and an empty split's share is 0.
        share = tl.exp(maximum - tl.max(maximum, 0))
        parts = tl.load(
            partial + (head * SPLITS + split)[:, None] * HEAD_DIM + d[None, :], mask=(total > 0)[:, None], other=0.0
        )  # fmt: skip
        y = tl.sum(parts * share[:, None], 0) / tl.sum(total * share, 0)
        tl.store(out + head * HEAD_DIM + d, y.to(out.dtype.element_ty))
