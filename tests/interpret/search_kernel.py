"""The search of `attention_select` alone: what it finds in rows of scores."""

import triton
import triton.language as tl

from ouro_build.kernels.attention_select.source import guess_of, threshold_of


@triton.jit
def search(scores, top, threshold, found, n, k, SCORES: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr):
    """Of the first `n` of scores float32 [SCORES]: threshold float32 [1]; found int32 [2], if it is exact, and the ties."""
    guess, step = guess_of(scores, n, k, 128)
    at, exact, ties = threshold_of(scores, n, k, tl.load(top), guess, step, SCORES, TILE, HELD)
    tl.store(threshold, at)
    tl.store(found, exact.to(tl.int32))
    tl.store(found + 1, ties)
