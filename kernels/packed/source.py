"""Places of a weight matrix's rows and columns in its blocks of 16 rows and 32 columns, in elements."""

import triton
import triton.language as tl


@triton.jit
def row_offset(n, K: tl.constexpr):
    """Where row `n` begins in a matrix of K columns. 64-bit: it may have more than 2^31 elements."""
    n = n.to(tl.uint32)  # without a sign, shifts leave what is constant in `n` a constant in addresses
    return (n >> 4).to(tl.int64) * ((K + 31) // 32 * 512) + (n & 15) * 32


@triton.jit
def column_offset(k):
    """Where column `k` is from the beginning of its row: 32 columns on, a place is 512 elements on."""
    return k // 32 * 512 + k % 32
