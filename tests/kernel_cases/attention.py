"""A paged context of several requests, and the cases of the three attention kernels in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ouro_build.artifacts.plan import Buffer
from ouro_build.kernels.attention_decode import attention_decode
from ouro_build.kernels.attention_merge import attention_merge
from ouro_build.kernels.attention_prefill import attention_prefill
from tests.kernel_cases import PART, Case, normal
from tests.kernel_cases.paged import in_order, kv_buffer, kv_values
from tests.kernel_harness import Values, buffer, poisoned, row_records

Rows = tuple[tuple[int, int, int] | None, ...]
"""(request, position, loop) of every row; None is a hole."""

# (heads, kv_heads, head_dim): one query head a kv head, grouped ones, a single kv head
SHAPES = ((4, 4, 16), (6, 2, 32), (2, 2, 64), (8, 1, 128), (2, 2, 128), (6, 2, 16))
# Contexts of one token, on either side of a block's edge, of several tiles; a hole first and in the middle; several loops.
DECODE_ROWS: Rows = (None, (0, 0, 0), (1, 14, 1), (1, 15, 2), (1, 16, 0), None, (2, 130, 1), (0, 63, 2))
# Three requests in one chunk, one starting within a block, holes between and inside them, one row a context of one token.
PREFILL_ROWS: Rows = (
    *((1, p, 1) for p in range(9, 22)), None, (0, 0, 0), None, (2, 100, 2), None, *((2, p, 2) for p in range(101, 120)),
    (0, 64, 1),
)  # fmt: skip
LAYERS, LOOPS, LAYER = 2, 3, 1


@dataclass(frozen=True)
class Context:
    """A KV pool whose requests own scattered blocks; what they do not own is NaN."""

    kv: Tensor
    tables: Tensor
    kv_buffer: Buffer
    values: Values


def context(
    dtype: str,
    device: str,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    lengths: tuple[int, ...] = (70, 40, 140),
    blocks_outer: bool = False,
) -> Context:
    """Random keys and values for `lengths` tokens of every request, in every plane; the order is that of `Cache`."""
    counts = [-(-n // block_size) for n in lengths]
    blocks, width, planes = sum(counts) + 3, max(counts) + 1, LOOPS * LAYERS
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    block = (2, kv_heads, block_size, head_dim)
    kv, tables = poisoned(buffer("kv", dtype, planes, blocks, *block)), torch.full((len(lengths), width), -1, dtype=torch.int32)
    data = normal("cpu", dtype, planes, blocks, *block, seed=2)
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        mine = [order.pop() for _ in range(count)]
        tables[request, :count] = torch.tensor(mine, dtype=torch.int32)
        for i, b in enumerate(mine):
            written = min(block_size, length - i * block_size)
            kv[:, b, :, :, :written] = data[:, b, :, :, :written]
    kv = in_order(kv, blocks_outer)
    return Context(kv.to(device), tables.to(device), kv_buffer(dtype, kv.shape, blocks_outer), kv_values(kv))


def records(rows: Rows, device: str) -> Tensor:
    """Row records in slots of their own; the fields of a hole are NaN's bits, -1."""
    columns = list(zip(*[row or (-1, -1, -1) for row in rows], strict=True))
    slots = [-1 if row is None else i for i, row in enumerate(rows)]
    return row_records(slots, device, request=list(columns[0]), position=list(columns[1]), loop=list(columns[2]))


def queries(rows: Rows, dtype: str, device: str, heads: int, head_dim: int) -> Tensor:
    """Random queries; those of holes are NaN."""
    q = normal("cpu", dtype, len(rows), heads, head_dim, seed=3)
    q[[i for i, row in enumerate(rows) if row is None]] = float("nan")
    return q.to(device)


def decode_case(
    dtype: str,
    device: str = "cpu",
    shape: tuple[int, int, int] = (4, 4, 16),
    rows: Rows = DECODE_ROWS,
    splits: int = 3,
    block_size: int = 16,
    ctx: Context | None = None,
) -> Case:
    """One step of rows of several requests and loops."""
    heads, kv_heads, head_dim = shape
    ctx = ctx or context(dtype, device, kv_heads, head_dim, block_size)
    partial = buffer("partial", "float32", len(rows), heads, splits, head_dim)
    sums = buffer("sums", "float32", len(rows), heads, splits, 2)
    launch = attention_decode(
        PART,
        rows=buffer("rows", "int32", len(rows), 8),
        q=buffer("q", dtype, len(rows), heads, head_dim),
        block_tables=buffer("block_tables", "int32", *ctx.tables.shape),
        kv=ctx.kv_buffer,
        partial=partial,
        sums=sums,
        layer=LAYER,
        layers=LAYERS,
    )
    tensors = {
        "rows": records(rows, device),
        "q": queries(rows, dtype, device, heads, head_dim),
        "block_tables": ctx.tables,
        "kv": ctx.kv,
        "partial": poisoned(partial, device=device),
        "sums": poisoned(sums, device=device),
    }
    return Case(launch, tensors, dict(ctx.values))


def prefill_case(
    dtype: str,
    device: str = "cpu",
    shape: tuple[int, int, int] = (4, 4, 16),
    rows: Rows = PREFILL_ROWS,
    block_size: int = 16,
    ctx: Context | None = None,
) -> Case:
    """One chunk of rows of several requests."""
    heads, kv_heads, head_dim = shape
    ctx = ctx or context(dtype, device, kv_heads, head_dim, block_size)
    out = buffer("out", dtype, len(rows), heads * head_dim)
    launch = attention_prefill(
        PART,
        rows=buffer("rows", "int32", len(rows), 8),
        q=buffer("q", dtype, len(rows), heads, head_dim),
        block_tables=buffer("block_tables", "int32", *ctx.tables.shape),
        kv=ctx.kv_buffer,
        out=out,
        layer=LAYER,
        layers=LAYERS,
    )
    tensors = {
        "rows": records(rows, device),
        "q": queries(rows, dtype, device, heads, head_dim),
        "block_tables": ctx.tables,
        "kv": ctx.kv,
        "out": poisoned(out, device=device),
    }
    return Case(launch, tensors, dict(ctx.values))


def merge_case(dtype: str, device: str = "cpu", heads: int = 3, splits: int = 5, head_dim: int = 32) -> Case:
    """Splits of very different maxima; from row to row fewer of them have keys, down to the first alone."""
    bucket = splits + 1
    partial = normal("cpu", "float32", bucket, heads, splits, head_dim)
    sums = torch.stack((normal("cpu", "float32", bucket, heads, splits) * 4, torch.rand(bucket, heads, splits) + 1), -1)
    for row in range(bucket):
        empty = slice(max(1, splits - row), None)
        partial[row, :, empty], sums[row, :, empty, 0], sums[row, :, empty, 1] = float("nan"), float("-inf"), 0.0
    out = buffer("out", dtype, bucket, heads * head_dim)
    shape = (bucket, heads, splits)
    launch = attention_merge(
        PART,
        rows=buffer("rows", "int32", bucket, 8),
        partial=buffer("partial", "float32", *shape, head_dim),
        sums=buffer("sums", "float32", *shape, 2),
        out=out,
    )
    slots = [-1 if i == 1 else bucket - i for i in range(bucket)]
    tensors = {
        "rows": row_records(slots, device),
        "partial": partial.to(device),
        "sums": sums.to(device),
        "out": poisoned(out, device=device),
    }
    return Case(launch, tensors)


def merged(case: Case, dtype: str = "float32", device: str = "cpu") -> Case:
    """The merge of a decode case that has run."""
    buffers = dict(case.launch.buffers())
    bucket, heads, _, head_dim = buffers["partial"].sizes
    out = buffer("out", dtype, bucket, heads * head_dim)
    launch = attention_merge(PART, rows=buffers["rows"], partial=buffers["partial"], sums=buffers["sums"], out=out)
    tensors = {name: case.tensors[name] for name in ("rows", "partial", "sums")}
    return Case(launch, {**tensors, "out": poisoned(out, device=device)})
