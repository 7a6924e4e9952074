"""Torch reference of `kv_copy`."""

from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active


def kv_copy(rows: Tensor, block_tables: Tensor, kv: Tensor, LAYERS: int, LOOPS: int) -> None:
    """Copy active rows' keys and values of the last loop they ran to the loops they skipped."""
    live, _ = active(rows)
    by_loop = kv.view(LOOPS, LAYERS, *kv.shape[1:])
    block_size = kv.shape[4]
    for loop in range(1, LOOPS):
        ran = rows[live[rows[live, Row.LOOP] == loop]]
        positions = ran[:, Row.POSITION].long()
        blocks = block_tables[ran[:, Row.REQUEST].long(), positions // block_size].long()
        kept = by_loop[loop - 1, :, blocks, :, :, positions % block_size]
        for skipped in range(loop, LOOPS):
            by_loop[skipped, :, blocks, :, :, positions % block_size] = kept
