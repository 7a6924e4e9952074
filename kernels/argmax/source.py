"""Triton source of `argmax`: one program a row, looping over large blocks; every lane keeps its own best."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait

_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def argmax(rows, logits, tokens, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows + row * 8) >= 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_at = tl.full([BLOCK], _NONE, tl.int32)
        for start in range(0, VOCABULARY, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < VOCABULARY
            x = tl.load(logits + row * VOCABULARY + at, mask=inside, other=0.0).to(tl.float32)
            # x == x: not NaN. A lane's first number is taken whatever it is: it may be minus infinity.
            better = inside & (x == x) & ((x > best) | (best_at == _NONE))
            best = tl.where(better, x, best)
            best_at = tl.where(better, at, best_at)
        found = tl.min(tl.where(best == tl.max(best, 0), best_at, _NONE), 0)
        tl.store(tokens + row, tl.where(found == _NONE, 0, found))
