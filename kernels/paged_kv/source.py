"""Addresses in the paged KV pool [planes, blocks, 2, kv_heads, block_size, head_dim], in elements."""

import triton
import triton.language as tl


@triton.jit
def head_offset(
    plane_stride, loop, layer, kv_head, LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Where a head's keys begin in block 0 of plane (loop, layer). 64-bit: a pool may have more than 2^31 elements."""
    return (loop.to(tl.int64) * LAYERS + layer) * plane_stride + kv_head * (BLOCK_SIZE * HEAD_DIM)


@triton.jit
def key_offsets(block, position, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where the keys of `position`s begin, relative to `head_offset`, given their KV blocks."""
    # Without a sign, a remainder is a mask, and the product of two words one instruction.
    return block.to(tl.uint32).to(tl.uint64) * block_stride.to(tl.uint32) + position.to(tl.uint32) % BLOCK_SIZE * HEAD_DIM
