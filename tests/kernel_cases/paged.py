"""A small paged cache: its buffers, block tables and the rows that kernels meet in it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ouro_build.artifacts.plan import Buffer, LoadTimeValue
from tests.kernel_cases import ints
from tests.kernel_harness import buffer

TABLES = ((5, 2, 9, -1), (-1, -1, -1, -1), (0, 7, 4, 3))
"""Block tables of three requests, unordered; the second has no block."""


@dataclass(frozen=True)
class Cache:
    """Geometry of the cache of a case. `plane_stride` is in elements."""

    layers: int = 3
    loops: int = 4
    blocks: int = 10
    kv_heads: int = 2
    block_size: int = 4
    head_dim: int = 16

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.layers * self.loops, self.blocks, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def values(self) -> dict[LoadTimeValue, int]:
        stride = self.blocks * 2 * self.kv_heads * self.block_size * self.head_dim
        return {LoadTimeValue.KV_BLOCKS: self.blocks, LoadTimeValue.KV_PLANE_STRIDE: stride}

    def kv_buffer(self, dtype: str) -> Buffer:
        planes, _, *rest = self.kv_shape
        return buffer("kv", dtype, planes, LoadTimeValue.KV_BLOCKS, *rest)

    def tables_buffer(self) -> Buffer:
        return buffer("block_tables", "int32", len(TABLES), len(TABLES[0]))

    def tables(self, device: str) -> Tensor:
        return ints(device, TABLES)


def far_planes() -> Cache:
    """A cache whose last plane starts beyond 2^31 elements, and so, in two-byte types, beyond 4 GiB."""
    return Cache(layers=16, loops=4, blocks=2**31 // (63 * 4096) + 1, kv_heads=1, block_size=16, head_dim=128)


def long_plane() -> Cache:
    """A cache of one plane, whose last block starts beyond 2^31 elements."""
    return Cache(layers=1, loops=1, blocks=2**31 // 4096 + 1, kv_heads=1, block_size=16, head_dim=128)


def far_kv(cache: Cache, device: str) -> Tensor:
    """The float16 tensor of such a cache. On the host only the pages that are touched exist."""
    if device == "cpu":
        return torch.from_numpy(np.zeros(cache.kv_shape, np.float16))
    return torch.zeros(cache.kv_shape, dtype=torch.float16, device=device)


def start_of(kv: Tensor) -> Tensor:
    """The tensor's address with a storage of one element, on the host: the interpreter copies whole storages."""
    if kv.is_cuda:
        return kv
    first = (ctypes.c_uint8 * kv.element_size()).from_address(kv.data_ptr())
    return torch.frombuffer(first, dtype=kv.dtype)
