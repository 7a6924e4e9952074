"""Triton source of `rope_kv_write`: a program takes some heads of one row, be they queries, keys or values."""

import triton
import triton.language as tl

from ouro_build.kernels.dependencies.source import release, wait
from ouro_build.kernels.paged_kv.source import head_offset, key_offsets


@triton.jit
def rope_kv_write(
    rows, qkv, blocks, rotation, kv, q, plane_stride, block_stride, layer, LAYERS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    release(PROGRAMMATIC)
    wait(PROGRAMMATIC)
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    TYPE: tl.constexpr = q.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    record = rows + row * 8
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    at = tl.arange(0, HALF)[None, :]
    if tl.load(record) >= 0:
        cos = tl.load(rotation + row * HEAD_DIM + at)
        sin = tl.load(rotation + row * HEAD_DIM + HALF + at)
        source = qkv + (row * ALL + head) * HEAD_DIM + at
        inside = (head < ALL) & (at < HALF)
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        turned = (head < HEADS + KV_HEADS) & (at < HALF)  # values are not
        rotated = tl.where(turned, first * cos - second * sin, first).to(TYPE)
        second = tl.where(turned, second * cos + first * sin, second).to(TYPE)
        query = (head < HEADS) & (at < HALF)
        to = q + (row * HEADS + head) * HEAD_DIM + at
        tl.store(to, rotated, mask=query)
        tl.store(to + HALF, second, mask=query)
        # Heads of keys and then of values follow each other in a block.
        place = head_offset(plane_stride, tl.load(record + 2), layer, head - HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM)
        place += key_offsets(tl.load(blocks + row), tl.load(record + 1), block_stride, BLOCK_SIZE, HEAD_DIM)
        to = kv + place + at
        cached = inside & (head >= HEADS)
        tl.store(to, rotated, mask=cached)
        tl.store(to + HALF, second, mask=cached)
