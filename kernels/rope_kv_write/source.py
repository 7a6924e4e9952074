"""Triton source of `rope_kv_write`: a program rotates one head of one row; a key's program also writes its value."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets


@triton.jit
def rope_kv_write(
    rows, qkv, blocks, rotation, kv, q, plane_stride, block_stride, layer, LAYERS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    HALF: tl.constexpr = HEAD_DIM // 2
    TYPE: tl.constexpr = q.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    record = rows + row * 8
    at = tl.arange(0, HALF)
    if tl.load(record) >= 0:
        cos = tl.load(rotation + row * HEAD_DIM + at)
        sin = tl.load(rotation + row * HEAD_DIM + HALF + at)
        source = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + at
        first = tl.load(source).to(tl.float32)
        second = tl.load(source + HALF).to(tl.float32)
        rotated_first = (first * cos - second * sin).to(TYPE)
        rotated_second = (second * cos + first * sin).to(TYPE)
        if head < HEADS:
            target = q + (row * HEADS + head) * HEAD_DIM + at
            tl.store(target, rotated_first)
            tl.store(target + HALF, rotated_second)
        else:
            key = kv + head_offset(plane_stride, tl.load(record + 2), layer, head - HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM) + at
            key += key_offsets(tl.load(blocks + row), tl.load(record + 1), block_stride, BLOCK_SIZE, HEAD_DIM)
            tl.store(key, rotated_first)
            tl.store(key + HALF, rotated_second)
            value = key + KV_HEADS * BLOCK_SIZE * HEAD_DIM
            source += KV_HEADS * HEAD_DIM
            tl.store(value, tl.load(source))
            tl.store(value + HALF, tl.load(source + HALF))
