"""Triton source of `rope_kv_write`: a program rotates one head of one row; a key's program also writes its value."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait


@triton.jit
def rope_kv_write(
    rows,
    qkv,
    inv_freq,
    block_tables,
    kv,
    q,
    plane_stride,
    block_stride,
    layer,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    release(PROGRAMMATIC)
    HALF: tl.constexpr = HEAD_DIM // 2
    TYPE: tl.constexpr = q.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    record = rows + row * 8
    at = tl.arange(0, HALF)
    frequency = tl.load(inv_freq + at)
    wait(PROGRAMMATIC)
    if tl.load(record) >= 0:
        position = tl.load(record + 1)
        angle = position.to(tl.float32) * frequency
        cos = tl.cos(angle)
        sin = tl.sin(angle)
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
            plane = (tl.load(record + 2) * LAYERS + layer).to(tl.int64)
            request = tl.load(record + 3).to(tl.int64)
            block = tl.load(block_tables + request * TABLE_WIDTH + position // BLOCK_SIZE).to(tl.int64)
            key = kv + plane * plane_stride + block * block_stride
            key += ((head - HEADS) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + at
            tl.store(key, rotated_first)
            tl.store(key + HALF, rotated_second)
            value = key + KV_HEADS * BLOCK_SIZE * HEAD_DIM
            source += KV_HEADS * HEAD_DIM
            tl.store(value, tl.load(source))
            tl.store(value + HALF, tl.load(source + HALF))
