"""Reads a whole pool and does nothing else: how fast the card's memory can be read."""

from __future__ import annotations

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div

KERNEL = Kernel(
    name="read_pool",
    contract=1,
    writes=("sums",),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
)
MOST_PROGRAMS = 1024
"""Elements that `sums` must have."""

# 32 words a thread are 8 loads of 16 bytes under way; 4 programs a multiprocessor make 128 KiB of them, several times what
# bandwidth times latency asks for.
_PER_MULTIPROCESSOR = 4
_BLOCK, _WARPS = 8192, 8


def read_pool(part: Part, *, pool: Buffer, sums: Buffer) -> Launch:
    """`sums[p]` = the sum, modulo 2^32, of every word of `pool` in the blocks that are program p's: every PROGRAMS-th.

    pool int32 [words], a multiple of 4 words; sums int32 [MOST_PROGRAMS], of which one for each program is written.
    """
    words = pool.sizes[0]
    programs = min(MOST_PROGRAMS, _PER_MULTIPROCESSOR * part.sm_count, ceil_div(words, _BLOCK))
    return KERNEL.launch(
        part,
        grid=(programs, 1, 1),
        arguments={"pool": pool, "sums": sums},
        constants={"WORDS": words, "PROGRAMS": programs, "BLOCK": _BLOCK},
        options=Options(num_warps=_WARPS, num_stages=1),
    )
