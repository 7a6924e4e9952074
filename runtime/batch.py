"""A step's inputs as the host writes them: one array, one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError, RequestError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.artifacts.rows import RECORD, InputColumn, Mode
from ouro_build.runtime.memory import Memory

_ANY = np.iinfo(np.int32).max


class RowInput(NamedTuple):
    """One row of a step. `slot` is its state slot; -1 elsewhere keeps what the state holds.

    `token` is the row's input; a slot that decodes holds the token sampled last. `position` >= 0 starts the slot anew at
    that position; after each step the device moves it on. `request` is the index of the request's block table, below
    `geometry.max_requests`. `block` is the KV block that holds the row's position, given when the position is the first of a
    block. `mode`, one of `Mode`, says what the row does in its loops, and is DENSE in a slot that is started anew without it; a
    row that captures or consumes has a `reference_slot` under the `generation` of its lease (`Steps.references`), or
    `geometry.padding_slot` for none.
    """

    slot: int
    token: int = -1
    position: int = -1
    request: int = -1
    block: int = -1
    mode: int = -1
    reference_slot: int = -1
    generation: int = -1


def row_limits(model: ModelConfig, geometry: Geometry, kv_blocks: int) -> RowInput:
    """What every column of a row must be below: the device uses them as indices and checks none of them."""
    return RowInput(
        slot=geometry.slots,
        token=model.vocab_size,
        position=geometry.max_context,
        request=geometry.max_requests,
        block=kv_blocks,
        mode=len(Mode),
        reference_slot=geometry.padding_slot + 1,
        generation=_ANY,
    )


class StepInputs:
    """The io buffers that a step is described in: coda_batch, batch and inputs, adjacent from the pool's first byte."""

    def __init__(self, buffers: Mapping[str, Buffer], limits: RowInput) -> None:
        coda, batch, inputs = (buffers[name] for name in ("coda_batch", "batch", "inputs"))
        self._coda, self._rows = coda.sizes[0], batch.sizes[0]
        self._places = [b.offset // 4 for b in (coda, batch, inputs)]
        if not 0 == self._places[0] < self._places[1] < self._places[2]:
            raise ArtifactError("coda_batch, batch and inputs are not adjacent at the start of the io pool", where="plans")
        self._host = np.full(self._places[2] + self._rows * RECORD, -1, np.int32)
        self._limits = np.array(limits, np.int32)

    def write(self, memory: Memory, rows: Sequence[RowInput], coda: Sequence[int]) -> None:
        """Submit `rows` as the batch and `coda` as the slots whose logits are wanted; the rest of both lists is -1.

        Raises RequestError, and submits nothing, for more of them than there is room for, and for a value that nothing has.
        """
        table = self._table(rows)
        host, (_, batch, inputs) = self._host, self._places
        host.fill(-1)
        host[: len(coda)] = self._slots(coda)
        host[batch : batch + len(rows)] = table[:, 0]
        host[inputs : inputs + table.size] = table.reshape(-1)
        memory.write(Pool.IO, 0, host)

    def write_coda(self, memory: Memory, coda: Sequence[int]) -> None:
        """Replace the coda batch alone. Raises RequestError as `write` does."""
        line = np.full(self._coda, -1, np.int32)
        line[: len(coda)] = self._slots(coda)
        memory.write(Pool.IO, 0, line)

    def _table(self, rows: Sequence[RowInput]) -> NDArray[np.int32]:
        _check_room("rows", len(rows), self._rows)
        table = np.array(rows, np.int64).reshape(-1, RECORD)
        wrong = (table < -1) | (table >= self._limits)
        if wrong.any():
            at, column = (int(i) for i in np.argwhere(wrong)[0])
            name, value, limit = RowInput._fields[column], int(table[at, column]), int(self._limits[column])
            raise RequestError(f"{name} is {value}, below {limit} expected", where=f"row {at}")
        named = np.sort(table[table[:, 0] >= 0, 0])  # np.unique would import numpy.ma, at the first step of a worker
        if (named[1:] == named[:-1]).any():
            raise RequestError(f"two rows name one state slot: {named.tolist()}", where="rows")
        self._check_started(table)
        table[(table[:, InputColumn.POSITION] >= 0) & (table[:, InputColumn.MODE] < 0), InputColumn.MODE] = Mode.DENSE
        return table.astype(np.int32)

    def _check_started(self, table: NDArray[np.int64]) -> None:
        """A row that is given its position starts anew: what its slot held before is another row's."""
        started = (table[:, InputColumn.SLOT] >= 0) & (table[:, InputColumn.POSITION] >= 0)
        for column in (InputColumn.TOKEN, InputColumn.REQUEST):
            lacking = np.flatnonzero(started & (table[:, column] < 0))
            if len(lacking):
                what = f"it has a position and no {column.name.lower()}"
                raise RequestError(what, where=f"row {lacking[0]}", hint="A row that starts at a position needs both.")

    def _slots(self, slots: Sequence[int]) -> NDArray[np.int64]:
        _check_room("coda slots", len(slots), self._coda)
        found = np.array(slots, np.int64)
        wrong = (found < -1) | (found >= self._limits[0])
        if wrong.any():
            raise RequestError(f"slot {int(found[wrong][0])}, below {int(self._limits[0])} expected", where="coda")
        return found


def _check_room(what: str, count: int, room: int) -> None:
    if count > room:
        raise RequestError(f"{count} {what}, there is room for {room}", hint="Run them in several parts.")
