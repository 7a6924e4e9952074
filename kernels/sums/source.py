"""Sums over an axis that warps share, as a Triton function."""

import triton
import triton.language as tl


@triton.jit
def sum_first(x, COUNT: tl.constexpr):
    """The sum of `x` [COUNT, …, …] over its first axis, whose length is a power of two, at most 256: halves are added until one
    is left.

    A thread comes to hold all that it adds after one exchange through shared memory, where `tl.sum` makes several.
    """
    for level in tl.static_range(8):
        if COUNT >> level > 1:
            halves = x.reshape(2, COUNT >> (level + 1), x.shape[1], x.shape[2])
            first, second = tl.split(halves.permute(1, 2, 3, 0))
            x = first + second
    return x.reshape(x.shape[1], x.shape[2])
