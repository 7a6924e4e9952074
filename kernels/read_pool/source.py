"""Triton source of `read_pool`: a program takes every PROGRAMS-th block, every thread of it 16 bytes a load."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def read_pool(pool, sums, WORDS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for turn in range(tl.cdiv(WORDS, PROGRAMS * BLOCK)):
        at = (turn * PROGRAMS + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(pool + at, mask=at < WORDS, other=0, eviction_policy="evict_first")
    # Summed as 64 bits and cut: some interpreters refuse a sum that wraps.
    tl.store(sums + program, tl.sum(total.to(tl.int64), 0).to(tl.int32))
