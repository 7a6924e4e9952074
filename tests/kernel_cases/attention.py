"""A paged context of several requests, and the cases of the attention kernels in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial as given

import msgspec
import torch
from torch import Tensor

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer
from ouro_build.kernels.attention_capture import attention_capture
from ouro_build.kernels.attention_decode import attention_decode, split_rule
from ouro_build.kernels.attention_merge import attention_merge
from ouro_build.kernels.attention_prefill import attention_prefill
from ouro_build.kernels.paged_kv import page_shape
from ouro_build.kernels.split_contexts import SPLIT_RECORD, Split, SplitRule
from tests.kernel_cases import PART, Case, normal
from tests.kernel_cases.paged import in_order, kv_buffer, kv_values
from tests.kernel_harness import Values, buffer, poisoned, row_records

Rows = tuple[tuple[int, int, int] | None, ...]
"""(request, position, loop) of every row; None is a hole."""

# (heads, kv_heads, head_dim): one query head a kv head, grouped ones, a single kv head
SHAPES = ((4, 4, 16), (6, 2, 32), (2, 2, 64), (8, 1, 128), (2, 2, 128), (6, 2, 16))
# Contexts of one token, on either side of a block's edge, of several tiles; a hole first and in the middle; several loops;
# rows of one request and loop, of which each reads what those before it write.
DECODE_ROWS: Rows = (
    None, (0, 0, 0), (1, 14, 1), (1, 15, 2), (1, 16, 0), None, (2, 130, 1), (0, 63, 2), (2, 129, 1), (2, 97, 1)
)  # fmt: skip
# Three requests in one chunk, one starting within a block, holes between and inside them, one row a context of one token.
PREFILL_ROWS: Rows = (
    *((1, p, 1) for p in range(9, 22)), None, (0, 0, 0), None, (2, 100, 2), None, *((2, p, 2) for p in range(101, 120)),
    (0, 64, 1),
)  # fmt: skip
LAYERS, LOOPS, LAYER = 2, 3, 1
# A place in memory that was not written may hold anything: this is a NaN's bits, and as a position one that overflows.
WORST = 2**31 - 1


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


def settled_positions(rows: Rows) -> list[int]:
    """By row, the least position of a row of the same request and loop; -1 for a hole."""
    places = [row for row in rows if row]
    return [min(p for r, p, u in places if (r, u) == (row[0], row[2])) if row else -1 for row in rows]


def queries(rows: Rows, dtype: str, device: str, heads: int, head_dim: int) -> Tensor:
    """Random queries; those of holes are NaN."""
    q = normal("cpu", dtype, len(rows), heads, head_dim, seed=3)
    q[[i for i, row in enumerate(rows) if row is None]] = float("nan")
    return q.to(device)


def split_records(rows: Rows, rule: SplitRule, limit: int, tables: Tensor, block_size: int, rest: int) -> Tensor:
    """What `split_contexts` makes of `rows`, told another way; what it does not write is `rest`."""
    table = torch.full((limit, SPLIT_RECORD + rule.tile // 8), rest, dtype=torch.int32)
    table[:, Split.ROW] = -1
    at = 0
    for row, known in enumerate(rows):
        if known is None:
            continue
        request, position, loop = known
        tiles = position // rule.tile + 1
        wanted = min(max(rule.least, -(-tiles // rule.longest)), -(-tiles // rule.shortest))
        span = -(-(position + 1) // wanted // 8) * 8
        firsts = list(range(0, position + 1, span))
        for index, first in enumerate(firsts):
            record = [
                row,
                index,
                len(firsts),
                first,
                min(first + span, position + 1),
                request,
                loop,
                settled_positions(rows)[row],
            ]
            table[at, : len(record)] = torch.tensor(record, dtype=torch.int32)
            table[at, SPLIT_RECORD:] = 0
            for eight, key in enumerate(range(first, min(first + rule.tile, record[4]), 8)):
                table[at, SPLIT_RECORD + eight] = tables[request, key // block_size]
            at += 1
    return table


def decode_case(
    dtype: str,
    device: str = "cpu",
    shape: tuple[int, int, int] = (4, 4, 16),
    rows: Rows = DECODE_ROWS,
    least: int = 3,
    block_size: int = 16,
    ctx: Context | None = None,
    rule: SplitRule | None = None,
    part: Part = PART,
    rest: int = WORST,
    capture: bool = False,
) -> Case:
    """One step of rows of several requests and loops, each cut into `least` splits or, with few keys, fewer; with `capture`
    their scores are kept."""
    heads, kv_heads, head_dim = shape
    ctx = ctx or context(dtype, device, kv_heads, head_dim, block_size)
    tile = split_rule(part, len(rows), heads, kv_heads, head_dim, dtype).tile
    rule = rule or SplitRule(tile, least, 1 << 20, 1)
    most = rule.most(max(row[1] + 1 for row in rows if row))
    splits = buffer("splits", "int32", len(rows) * most, rule.record)
    partial = buffer("partial", "float32", len(rows), heads, most, head_dim)
    sums = buffer("sums", "float32", len(rows), heads, most, 2)
    scores = buffer("scores", "float32", len(rows), heads, ctx.tables.shape[1] * page_shape(ctx.kv_buffer)[1])
    attend = given(attention_capture, scores=scores) if capture else attention_decode
    launch = attend(
        part,
        splits=splits,
        q=buffer("q", dtype, len(rows), heads, head_dim),
        block_tables=buffer("block_tables", "int32", *ctx.tables.shape),
        kv=ctx.kv_buffer,
        partial=partial,
        sums=sums,
        layer=LAYER,
        layers=LAYERS,
        rule=rule,
    )
    tensors = {
        "splits": split_records(rows, rule, splits.sizes[0], ctx.tables, page_shape(ctx.kv_buffer)[1], rest).to(device),
        "q": queries(rows, dtype, device, heads, head_dim),
        "block_tables": ctx.tables,
        "kv": ctx.kv,
        "partial": poisoned(partial, device=device),
        "sums": poisoned(sums, device=device),
        **({"scores": poisoned(scores, device=device)} if capture else {}),
    }
    return Case(launch, tensors, dict(ctx.values))


def no_split_case(dtype: str, device: str, shape: tuple[int, int, int], rest: int, multiprocessors: int) -> Case:
    """Records of no split hold `rest`; with few multiprocessors, programs take several pairs each."""
    case = decode_case(dtype, device, shape, part=msgspec.structs.replace(PART, sm_count=multiprocessors), rest=rest)
    assert bool(dict(case.launch.specialization.constants)["LIMIT"]) == (multiprocessors == 1)
    return case


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
    """Splits of very different maxima; from row to row fewer of them, down to none."""
    bucket = splits + 1
    partial = normal("cpu", "float32", bucket, heads, splits, head_dim)
    sums = torch.stack((normal("cpu", "float32", bucket, heads, splits) * 4, torch.rand(bucket, heads, splits) + 1), -1)
    counts = torch.arange(splits, -1, -1, dtype=torch.int32)
    for row, count in enumerate(counts.tolist()):
        partial[row, :, count:], sums[row, :, count:] = float("nan"), float("nan")
    out = buffer("out", dtype, bucket, heads * head_dim)
    launch = attention_merge(
        PART,
        counts=buffer("counts", "int32", bucket),
        partial=buffer("partial", "float32", bucket, heads, splits, head_dim),
        sums=buffer("sums", "float32", bucket, heads, splits, 2),
        out=out,
    )
    tensors = {
        "counts": counts.to(device),
        "partial": partial.to(device),
        "sums": sums.to(device),
        "out": poisoned(out, device=device),
    }
    return Case(launch, tensors)


def merged(case: Case, dtype: str, device: str = "cpu") -> Case:
    """The merge of a decode case that has run."""
    buffers = dict(case.launch.buffers())
    bucket, heads, _, head_dim = buffers["partial"].sizes
    out, counts = buffer("out", dtype, bucket, heads * head_dim), buffer("counts", "int32", bucket)
    launch = attention_merge(PART, counts=counts, partial=buffers["partial"], sums=buffers["sums"], out=out)
    rows = case.tensors["splits"][:, Split.ROW]
    tensors = {name: case.tensors[name] for name in ("partial", "sums")}
    tensors["counts"] = torch.bincount(rows[rows >= 0], minlength=bucket).to(torch.int32)
    return Case(launch, {**tensors, "out": poisoned(out, device=device)})
