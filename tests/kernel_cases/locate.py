"""Cases of `locate`, and what it leaves for the kernels that rotate and write keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.locate import locate
from tests.kernel_cases import PART, Case
from tests.kernel_cases.paged import Cache
from tests.kernel_harness import buffer, poisoned, row_records

HALVES = (8, 24, 64)


def inv_freq(half: int, device: str) -> Tensor:
    """Frequencies of a head of 2 * `half` elements."""
    return (1e6 ** (-torch.arange(0, half) / half)).to(device)


def case(dtype: str = "float32", device: str = "cpu", half: int = 16, last_position: int = 13) -> Case:
    """Two rows of one request in different blocks, a hole, a row of another request at `last_position`, one without a block."""
    cache = Cache()
    blocks, rotation = buffer("blocks", "int32", 5), buffer("rotation", "float32", 5, 2, half)
    launch = locate(
        PART,
        rows=buffer("rows", "int32", 5, 8),
        inv_freq=buffer("inv_freq", "float32", half),
        block_tables=cache.tables_buffer(),
        blocks=blocks,
        rotation=rotation,
        block_size=cache.block_size,
    )
    tensors = {
        "rows": row_records([6, -1, 0, 2, 1], device, position=[0, -1, 11, last_position, 3], request=[0, -1, 0, 2, 1]),
        "inv_freq": inv_freq(half, device),
        "block_tables": cache.tables(device),
        "blocks": poisoned(blocks, device=device),
        "rotation": poisoned(rotation, device=device),
    }
    tensors["block_tables"][1] = -1
    return Case(launch, tensors)


def places(rows: Tensor, tables: Tensor, half: int, block_size: int) -> dict[str, Tensor]:
    """`blocks` and `rotation` of resolved `rows`, as `locate` leaves them; poison for inactive ones."""
    blocks = torch.full((len(rows),), -1, dtype=torch.int32)
    rotation = torch.full((len(rows), 2, half), float("nan"))
    for i, record in enumerate(rows.tolist()):
        if record[Row.SLOT] >= 0:
            position = record[Row.POSITION]
            blocks[i] = tables[record[Row.REQUEST], position // block_size]
            angle = position * inv_freq(half, "cpu")
            rotation[i] = torch.stack((angle.cos(), angle.sin()))
    return {"blocks": blocks.to(rows.device), "rotation": rotation.to(rows.device)}
