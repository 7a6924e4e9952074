"""Triton source of `attention_merge`: one program a (row, head)."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def attention_merge(
    counts, partial, sums, out, MOST: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    release(PROGRAMMATIC)
    row = tl.program_id(0)
    count = tl.load(counts + row, cache_modifier=".cg")
    wait(PROGRAMMATIC)
    head = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, TILE)
    d = tl.arange(0, HEAD_DIM)
    partial += head * MOST * HEAD_DIM + d[None, :]
    sums += head * MOST * 2
    # The first tile is read whole, whatever is in it.
    top = tl.load(sums + split * 2, mask=split < MOST, other=0.0)
    total = tl.load(sums + split * 2 + 1, mask=split < MOST, other=0.0)
    share_of = tl.load(partial + split[:, None] * HEAD_DIM, mask=(split < MOST)[:, None], other=0.0)
    if count > 0:
        inside = split < count
        top = tl.where(inside, top, float("-inf"))
        maximum = tl.max(top, 0)
        weight = tl.exp(top - maximum)
        whole = tl.sum(tl.where(inside, total * weight, 0.0), 0)
        acc = tl.sum(tl.where(inside[:, None], share_of * weight[:, None], 0.0), 0)
        for first in range(TILE, count, TILE):
            after = first + split
            inside = after < count
            top = tl.load(sums + after * 2, mask=inside, other=float("-inf"))
            total = tl.load(sums + after * 2 + 1, mask=inside, other=0.0)
            share_of = tl.load(partial + after[:, None] * HEAD_DIM, mask=inside[:, None], other=0.0)
            higher = tl.maximum(maximum, tl.max(top, 0))
            weight = tl.exp(top - higher)
            keep = tl.exp(maximum - higher)
            whole = whole * keep + tl.sum(total * weight, 0)
            acc = acc * keep + tl.sum(share_of * weight[:, None], 0)
            maximum = higher
        tl.store(out + head * HEAD_DIM + d, (acc / whole).to(out.dtype.element_ty))
