"""Every program of a small model in made-up states, launch by launch: for what holds whatever runs a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ouro_build.artifacts.columns import decode_plan
from ouro_build.artifacts.dtypes import nbytes
from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Launch, LoadTimeValue, Pool, ProgramKey
from ouro_build.artifacts.rows import InputColumn, Row
from ouro_build.builder.buffers import kv_layout
from ouro_build.builder.plan_target import plan_target
from ouro_build.runtime.load_time import Values, load_time_values
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.scenes import Scene, blocks_needed
from tests.kernel_cases import PART

OUTLIVE = (Pool.KV, Pool.STATE, Pool.REFERENCES, Pool.IO)
"""The pools of what outlives a program."""
Run = Callable[[Launch, dict[str, Tensor], Values], None]
"""`run_source` or `run_reference` of the harness."""


@dataclass(frozen=True)
class Entered:
    """The rows of a made-up state: their places in the bucket, and per row its slot, request, position, reference slot."""

    places: list[int]
    slots: list[int]
    requests: list[int]
    positions: list[int]
    references: list[int]

    def without(self, row: int) -> Entered:
        """All but the row of that index."""
        return Entered(*(values[:row] + values[row + 1 :] for values in vars(self).values()))


class Programs:
    """The programs of a model of a few layers, on `device`, in every sparse mode."""

    def __init__(
        self,
        dtype: str,
        device: str = "cpu",
        *,
        buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        layers: int = 2,
    ) -> None:
        self.model = ModelConfig(
            vocab_size=70, hidden_size=64, intermediate_size=96, layers=layers, heads=4, kv_heads=2, head_dim=16, loops=3,
            max_position=256, rms_norm_eps=(1e-6).hex(), rope_theta=(1e4).hex(), tied_embeddings=False, dtype=dtype,
        )  # fmt: skip
        self.geometry = Geometry(
            buckets=tuple(buckets), prefill_buckets=tuple(prefill_buckets), max_context=64, max_requests=4, block_size=16,
            sparse_modes=SPARSE_MODES, key_retention=0.25, key_capacity=16, reference_slots=4,
        )  # fmt: skip
        target = plan_target(self.model, self.geometry, PART, None)
        self._index, self._columns = target.index, target.columns
        self._entries = {entry.key: entry for entry in self._index.plans}
        self._buffers = {b.name: b for b in self._index.buffers}
        self._blocks = blocks_needed(self.geometry)
        self.values = load_time_values(kv_layout(self.model, self.geometry), self._blocks, PART.sm_count)
        kv = self._blocks * self.geometry.block_bytes(self.model)
        self._host = HostMemory({**target.pools, Pool.KV: kv})
        self._write_weights()
        self._arenas = {pool: torch.from_numpy(self._host.arena(pool)).to(device) for pool in Pool if self._host.size(pool)}

    @property
    def keys(self) -> list[ProgramKey]:
        """Every program but `read`, which has no rows."""
        return [key for key in self._entries if key.program != "read"]

    def enter(self, scene: ProgramKey, live: Sequence[bool], *, stop: bool = False) -> Entered:
        """Put the state that is made up for `scene` into the pools; its rows. `stop`: the first of them has ended.

        It stays in the batch, its slot inactive, and is not among the rows returned.
        """
        made = Scene(self.model, self.geometry, scene, live, self._blocks)
        made.write(self._host, self._buffers)
        places, slots = [i for i, alive in enumerate(live) if alive], made.slots.tolist()
        if stop:
            self._stop(places[0], slots[0])
        state = self._host_view("row_state")[slots]
        columns = (state[:, column].tolist() for column in (Row.REQUEST, Row.POSITION, Row.REFERENCE_SLOT))
        self._send()
        entered = Entered(places, slots, *columns)
        return entered.without(0) if stop else entered

    def launches(self, key: ProgramKey) -> list[tuple[Launch, dict[str, Tensor]]]:
        """The program's launches, each with its buffers in the pools."""
        plan = decode_plan(self._index, self._columns, self._entries[key])
        return [(x, {name: self._view(buffer) for name, buffer in x.buffers()}) for x in plan.launches]

    def run(self, key: ProgramKey, run: Run) -> None:
        """Every launch of the program by `run`."""
        for launch, tensors in self.launches(key):
            run(launch, tensors, self.values)

    def snapshot(self) -> dict[Pool, NDArray[np.uint8]]:
        """A copy of what outlives programs."""
        return {pool: self._arenas[pool].cpu().numpy().copy() for pool in OUTLIVE}

    def restore(self, snapshot: dict[Pool, NDArray[np.uint8]]) -> None:
        """Put back what outlives programs; what does not is no value any more."""
        for pool, contents in snapshot.items():
            self._arenas[pool].copy_(torch.from_numpy(contents))
        self._arenas[Pool.WORKSPACE].fill_(0xFF)

    def owned(self, rows: Entered) -> dict[Pool, NDArray[np.bool_]]:
        """Which of those bytes belong to `rows`."""
        masks = {pool: np.zeros(self._host.size(pool), np.bool_) for pool in OUTLIVE}
        size = self.geometry.block_size
        positions = np.array(rows.positions, int)
        entries = (np.array(rows.requests, int), positions // size)

        def lines(name: str) -> NDArray[np.bool_]:
            """The mask of a buffer: its shape, and a dimension for the bytes of an element."""
            buffer = self._buffers[name]
            shape = self._shape(buffer)
            mask = masks[buffer.pool][buffer.offset : buffer.offset + nbytes(buffer.dtype, shape)]
            return mask.reshape(*shape, -1)

        for name in ("row_state", "hidden", "gate_logits", "exit_probability"):
            lines(name)[rows.slots] = True
        lines("block_tables")[entries] = True
        lines("kv")[:, self._host_view("block_tables")[entries], :, :, positions % size] = True
        held = [slot for slot in rows.references if 0 <= slot < self.geometry.reference_slots]
        for name in (b.name for b in self._buffers.values() if b.name.startswith("reference_")):
            lines(name)[held] = True
        sampled = [place for place in rows.places if place < self.geometry.buckets[-1]]
        for name in ("logits", "tokens"):
            lines(name)[sampled] = True
        return masks

    def _stop(self, place: int, slot: int) -> None:
        self._host_view("row_state")[slot, Row.LOOP] = -1
        self._host_view("inputs")[place, InputColumn.SLOT] = -1

    def _send(self) -> None:
        for pool, arena in self._arenas.items():
            arena.copy_(torch.from_numpy(self._host.arena(pool)))

    def _write_weights(self) -> None:
        rng = np.random.default_rng(0)
        for buffer in self._buffers.values():
            if buffer.pool is Pool.WEIGHTS and buffer.dtype != "int32":  # int32: all of them, to be read as a whole
                values = rng.standard_normal(buffer.sizes, np.float32) / 8
                wide = buffer.dtype == "float32"  # bfloat16 is the upper half of float32
                self._host.write(Pool.WEIGHTS, buffer.offset, values if wide else values.view("<u2")[..., 1::2])

    def _shape(self, buffer: Buffer) -> tuple[int, ...]:
        return tuple(self.values[d] if isinstance(d, LoadTimeValue) else d for d in buffer.shape)

    def _host_view(self, name: str) -> NDArray[np.int32]:
        buffer = self._buffers[name]
        arena = self._host.arena(buffer.pool)[buffer.offset : buffer.offset + buffer.bytes]
        return arena.view(np.int32).reshape(buffer.sizes)

    def _view(self, buffer: Buffer) -> Tensor:
        shape = self._shape(buffer)
        raw = self._arenas[buffer.pool][buffer.offset : buffer.offset + nbytes(buffer.dtype, shape)]
        return raw.view(getattr(torch, buffer.dtype)).view(shape)


def check_inactive_rows(programs: Programs, key: ProgramKey, run: Run) -> None:
    """In a batch with holes and a row that has ended, the program must change no byte that outlives it but its active rows'."""
    rows = programs.enter(key, [i % 3 != 1 for i in range(key.bucket)], stop=True)
    before = programs.snapshot()
    programs.run(key, run)
    after, owned = programs.snapshot(), programs.owned(rows)
    changed = {pool: before[pool] != after[pool] for pool in OUTLIVE}
    assert any(which.any() for which in changed.values()), f"{key} left nothing behind: the state tests nothing"
    for pool, which in changed.items():
        strays = np.flatnonzero(which & ~owned[pool])
        assert not len(strays), f"{key} wrote bytes {strays[:8].tolist()} of {pool.name.lower()}, which no active row has"
