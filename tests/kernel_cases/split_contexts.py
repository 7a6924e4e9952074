"""Cases of `split_contexts`."""

from __future__ import annotations

from ouro_build.kernels.split_contexts import SPLIT_RECORD, SplitRule, split_contexts
from tests.kernel_cases import PART, Case
from tests.kernel_cases.attention import DECODE_ROWS, Rows, records
from tests.kernel_harness import buffer, poisoned

RULE = SplitRule(tile=16, least=3, longest=4, shortest=2)


def case(
    dtype: str = "int32", device: str = "cpu", rows: Rows = DECODE_ROWS, rule: SplitRule = RULE, max_context: int = 200
) -> Case:
    """The splits of `rows`; records, and counts of programs that arrived, start as poison."""
    splits = buffer("splits", dtype, len(rows) * rule.most(max_context), SPLIT_RECORD)
    arrived = buffer("arrived", "int32", len(rows), 3)
    rows_buffer = buffer("rows", "int32", len(rows), 8)
    launch = split_contexts(PART, rows=rows_buffer, splits=splits, arrived=arrived, rule=rule)
    tensors = {
        "rows": records(rows, device),
        "splits": poisoned(splits, device=device),
        "arrived": poisoned(arrived, device=device),
    }
    return Case(launch, tensors)
