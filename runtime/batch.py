"""A step's inputs as the host writes them: one array, one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.artifacts.rows import RECORD
from ouro_build.runtime.memory import Memory


class RowInput(NamedTuple):
    """One row of a step. `slot` is its state slot; -1 elsewhere keeps what the state holds.

    `position` >= 0 starts the slot anew at that position; `block` is the KV block that holds the row's position, given
    when the position is the first of a block.
    """

    slot: int
    token: int = -1
    position: int = -1
    request: int = -1
    block: int = -1
    mode: int = -1
    reference_slot: int = -1
    generation: int = -1


class StepInputs:
    """The io buffers that a step is described in: coda_batch, batch and inputs, adjacent from the pool's first byte."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        coda, batch, inputs = (buffers[name] for name in ("coda_batch", "batch", "inputs"))
        self._coda, self._rows = coda.sizes[0], batch.sizes[0]
        self._places = [b.offset // 4 for b in (coda, batch, inputs)]
        size = self._places[2] + self._rows * RECORD
        if not 0 == self._places[0] < self._places[1] < self._places[2]:
            raise ArtifactError("coda_batch, batch and inputs are not adjacent at the start of the io pool", where="plans")
        self._host = np.full(size, -1, np.int32)

    def write(self, memory: Memory, rows: Sequence[RowInput], coda: Sequence[int]) -> None:
        """Submit `rows` as the batch and `coda` as the slots whose logits are wanted; the rest of both lists is -1."""
        host, (_, batch, inputs) = self._host, self._places
        host[: inputs + len(rows) * RECORD] = -1
        host[: len(coda)] = coda
        table = np.array(rows, np.int32).reshape(-1, RECORD)
        host[batch : batch + len(rows)] = table[:, 0]
        host[inputs : inputs + table.size] = table.reshape(-1)
        # Records of an earlier, longer batch stay behind; every bucket that could reach them is padded to here.
        end = inputs + self._rows * RECORD
        host[inputs + table.size : end] = -1
        memory.write(Pool.IO, 0, host[:end])

    def write_coda(self, memory: Memory, coda: Sequence[int]) -> None:
        """Replace the coda batch alone."""
        line: NDArray[np.int32] = np.full(self._coda, -1, np.int32)
        line[: len(coda)] = coda
        memory.write(Pool.IO, 0, line)
