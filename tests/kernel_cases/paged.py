"""A small paged cache: its buffers, block tables and the rows that kernels meet in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ouro_build.artifacts.plan import Buffer, LoadTimeValue
from tests.kernel_cases import Case, ints
from tests.kernel_harness import buffer, poisoned

TABLES = ((5, 2, 9, -1), (-1, -1, -1, -1), (0, 7, 4, 3))
"""Block tables of three requests, unordered; the second has no block."""


def kv_buffer(dtype: str, shape: Sequence[int], blocks_outer: bool) -> Buffer:
    """A KV buffer in memory's order of planes and blocks; `shape` has planes first, and any number of blocks."""
    planes, _, *block = shape
    outer = (LoadTimeValue.KV_BLOCKS, planes) if blocks_outer else (planes, LoadTimeValue.KV_BLOCKS)
    return buffer("kv", dtype, *outer, *block)


def in_order(kv: Tensor, blocks_outer: bool) -> Tensor:
    """`kv`, planes first, with its planes or its blocks outermost in memory."""
    return kv.transpose(0, 1).contiguous().transpose(0, 1) if blocks_outer else kv.contiguous()


def kv_values(kv: Tensor) -> dict[LoadTimeValue, int]:
    """Load-time values of a pool, planes first."""
    return {
        LoadTimeValue.KV_BLOCKS: kv.shape[1],
        LoadTimeValue.KV_PLANE_STRIDE: kv.stride(0),
        LoadTimeValue.KV_BLOCK_STRIDE: kv.stride(1),
    }


def check_orders(planes_outer: Case, blocks_outer: Case) -> None:
    """One kernel, compiled once, does the same in pools of both orders, bit for bit, and what its reference says."""
    assert planes_outer.launch.specialization == blocks_outer.launch.specialization
    assert planes_outer.tensors["kv"].stride() != blocks_outer.tensors["kv"].stride()
    one, other = planes_outer.check(), blocks_outer.check()
    for name in one:
        assert one[name].contiguous().view(torch.uint8).equal(other[name].contiguous().view(torch.uint8)), name


@dataclass(frozen=True)
class Cache:
    """Geometry of the cache of a case. In memory a plane's blocks are adjacent, or a block's planes (`blocks_outer`)."""

    layers: int = 3
    loops: int = 4
    blocks: int = 10
    kv_heads: int = 2
    block_size: int = 4
    head_dim: int = 16
    blocks_outer: bool = False

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape with planes first, as the references see the pool."""
        return (self.layers * self.loops, self.blocks, 2, self.kv_heads, self.block_size, self.head_dim)

    @property
    def values(self) -> dict[LoadTimeValue, int]:
        return kv_values(in_order(torch.empty(self.kv_shape, device="meta"), self.blocks_outer))

    def kv_buffer(self, dtype: str) -> Buffer:
        return kv_buffer(dtype, self.kv_shape, self.blocks_outer)

    def poisoned_kv(self, dtype: str, device: str) -> Tensor:
        """A pool of NaN."""
        kv = poisoned(self.kv_buffer(dtype), self.values, device)
        return kv.transpose(0, 1) if self.blocks_outer else kv

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
