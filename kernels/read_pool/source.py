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
    tl.store(sums + program, tl.sum(total, 0))
