"""Cases of `split_contexts`."""

from __future__ import annotations

import torch

from ouro_build.kernels.split_contexts import SplitRule, split_contexts
from tests.kernel_cases import PART, Case
from tests.kernel_cases.attention import DECODE_ROWS, Rows, records
from tests.kernel_harness import buffer, poisoned

BLOCK_SIZE = 24
RULE = SplitRule(tile=16, least=3, longest=4, shortest=2)


def case(
    dtype: str = "int32",
    device: str = "cpu",
    rows: Rows = DECODE_ROWS,
    rule: SplitRule = RULE,
    max_context: int = 200,
    others: Rows | None = None,
) -> Case:
    """The splits of `rows`, in a batch where `others` are as well; records and counts start as poison."""
    splits = buffer("splits", dtype, len(rows) * rule.most(max_context), rule.record)
    counts = buffer("counts", "int32", len(rows))
    tables = buffer("block_tables", "int32", 6, -(-max_context // BLOCK_SIZE))
    rows_buffer, batch = (buffer(name, "int32", len(rows), 8) for name in ("rows", "batch"))
    whole = tuple(row or other for row, other in zip(rows, others or rows, strict=True))
    launch = split_contexts(
        PART, rows=rows_buffer, batch=batch, block_tables=tables, splits=splits, counts=counts, rule=rule, block_size=BLOCK_SIZE
    )
    tensors = {
        "rows": records(rows, device),
        "batch": records(whole, device),
        "block_tables": torch.arange(6 * tables.sizes[1], dtype=torch.int32).flip(0).view(tables.sizes).to(device),
        "splits": poisoned(splits, device=device),
        "counts": poisoned(counts, device=device),
    }
    return Case(launch, tensors)
