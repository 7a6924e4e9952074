"""Cuts rows' contexts into splits, the pieces that programs of decode attention take; the same for every layer of a loop."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch, Options
from ouro_build.kernels.spec import Kernel, Tolerance, ceil_div, next_power_of_2

KERNEL = Kernel(
    name="split_contexts",
    contract=4,
    writes=("splits", "counts"),
    tolerance=Tolerance(absolute={}, relative={}, reason="integers: equal"),
)

SPLIT_RECORD = 8
"""int32 values of a split's record, before the KV blocks of its first tile's eights."""


EIGHT = 8
"""Keys that are never in different splits: those of an eight of positions lie one after another in a KV block."""


class Split(IntEnum):
    """Columns of a split's record. Records of splits come first; after them `ROW` is -1."""

    ROW = 0
    INDEX = 1  # among the splits of its row
    COUNT = 2  # of the splits of its row
    FIRST = 3  # first position
    END = 4  # position after the last
    REQUEST = 5
    LOOP = 6
    SETTLED = 7  # no row of the batch writes keys before this position that the split's row reads


class SplitRule(NamedTuple):
    """How rows of a bucket are cut, each by its own length alone: what else is in the batch does not change a row's sums.

    A row is cut in `least`, in more if pieces would be longer than `longest` tiles of `tile` keys, but not in more than one for
    each `shortest` tiles that it has begun. All splits but the last are of the same length, a multiple of `EIGHT` keys, so
    there may be fewer.
    """

    tile: int
    least: int
    longest: int
    shortest: int

    def most(self, max_context: int) -> int:
        """No row of up to `max_context` keys has more splits."""
        return self._wanted(ceil_div(max_context, self.tile))

    @property
    def record(self) -> int:
        """int32 values of a split's record."""
        return SPLIT_RECORD + self.tile // EIGHT

    def span(self, keys: int) -> int:
        """Keys of each split but the last of a context of `keys` keys."""
        return ceil_div(keys, self._wanted(ceil_div(keys, self.tile)) * EIGHT) * EIGHT

    def count(self, keys: int) -> int:
        """Splits of a context of `keys` keys."""
        return ceil_div(keys, self.span(keys))

    def _wanted(self, tiles: int) -> int:
        return min(max(self.least, ceil_div(tiles, self.longest)), ceil_div(tiles, self.shortest))


def split_contexts(
    part: Part,
    *,
    rows: Buffer,
    batch: Buffer,
    block_tables: Buffer,
    splits: Buffer,
    counts: Buffer,
    rule: SplitRule,
    block_size: int,
) -> Launch:
    """The records of all splits of active rows, in the order of rows, and each row's number of splits.

    rows int32 [bucket, RECORD]; batch the same, of all rows whose keys the program writes; block_tables int32 [requests,
    blocks]; splits int32 [bucket * most, rule.record]: the `Split` columns, then the KV block of each eight of the first tile,
    0 past the end; counts int32 [bucket], 0 for an inactive row. Of a record after the last split only `ROW` is written.
    """
    bucket, limit = rows.sizes[0], splits.sizes[0]
    return KERNEL.launch(
        part,
        grid=(bucket, 1, 1),
        arguments={"rows": rows, "batch": batch, "block_tables": block_tables, "splits": splits, "counts": counts},
        constants={
            "ROWS": bucket,
            "ROW_TILE": next_power_of_2(bucket),
            "MOST": limit // bucket,
            "TILE": rule.tile,
            "LEAST": rule.least,
            "LONGEST": rule.longest,
            "SHORTEST": rule.shortest,
            "BLOCK_SIZE": block_size,
            "TABLE_WIDTH": block_tables.sizes[1],
        },
        options=Options(num_warps=1, num_stages=1),
    )
