"""Made-up worker states in which every program can be tried: random, seeded, with holes, poisoned where nothing may look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, LoadTimeValue, Pool, ProgramKey
from ouro_build.artifacts.rows import RECORD, Row
from ouro_build.runtime.batch import RowInput, StepInputs, row_limits
from ouro_build.runtime.memory import Memory
from ouro_build.runtime.scene_references import room, row_references, write_references

POISON = 0xFF
"""NaN in every float type, -1 in every integer type."""
SPAN = 20
"""Tokens of context that a made-up request may have before its rows of the batch."""
_PATTERN = 8 * (2**17 - 1)
"""Random elements that the KV pool repeats. No block's size has the prime in it: a hundred thousand blocks in a row differ."""


def live_patterns(bucket: int) -> tuple[tuple[bool, ...], ...]:
    """Which rows of a bucket live: every arrangement of a small bucket, else full, ends, every other, and two random ones."""
    if bucket <= 3:
        return tuple(tuple(bool(bits >> i & 1) for i in range(bucket)) for bits in range(1, 1 << bucket))
    rng = np.random.default_rng(bucket)
    masks = [[True] * bucket, [i == 0 for i in range(bucket)], [i == bucket - 1 for i in range(bucket)]]
    masks += [[i % 2 == 1 for i in range(bucket)], *(rng.random((2, bucket)) < 0.6).tolist()]
    return tuple(dict.fromkeys(tuple(map(bool, m)) for m in masks if any(m)))


class Scene:
    """A state for `key` with the rows of `live` in it. `kv_blocks`, those of the pool, must be at least `blocks_needed`.

    A request has up to `span` tokens of context, where there is room, before its rows of the batch.
    """

    def __init__(
        self,
        model: ModelConfig,
        geometry: Geometry,
        key: ProgramKey,
        live: Sequence[bool],
        kv_blocks: int,
        seed: int = 0,
        span: int = SPAN,
    ) -> None:
        self._model, self._geometry, self._key = model, geometry, key
        self._seed = [seed, key.bucket, sum(live)]
        self._rng = np.random.default_rng(self._seed)
        most = min(geometry.max_requests * geometry.max_context, room(key, geometry))
        self._rows = [i for i, alive in enumerate(live) if alive][:most]
        self._bucket = len(live)
        self._slots = self._rng.permutation(geometry.slots)[: self._bucket]
        self._place_rows(kv_blocks, span)
        self._references = row_references(self._rng, geometry, len(self._rows)) if geometry.references else None

    @property
    def slots(self) -> NDArray[np.int64]:
        """State slots of the live rows."""
        return self._slots[self._rows]

    def write(self, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
        """Poison every pool but the weights, then put the state there; the same bytes every time."""
        self._rng = np.random.default_rng([*self._seed, 1])
        for pool in Pool:
            if pool not in (Pool.WEIGHTS, Pool.KV):
                memory.fill(pool, POISON)
        self._write_state(memory, buffers)
        self._write_kv(memory, buffers["kv"])
        if self._references is not None:
            at = self._position
            write_references(memory, buffers, self._model, self._geometry, self._references, at, self._rng)
        slots = [int(self._slots[i]) if i in self._rows else -1 for i in range(self._bucket)]
        inputs = StepInputs(buffers, row_limits(self._model, self._geometry, len(self._filled)))
        if self._bucket <= self._geometry.buckets[-1]:
            inputs.write(memory, self._inputs(), slots)
            self._write_samples(memory, buffers)
        else:
            inputs.write(memory, self._inputs(), ())

    def _place_rows(self, kv_blocks: int, span: int) -> None:
        """Give the live rows requests, positions, loops and blocks; rows of one request are adjacent and ascending."""
        g, live = self._geometry, len(self._rows)
        wanted = max(3 if self._key.program == "prefill" else live, -(-live // g.max_context))
        share = -(-live // min(g.max_requests, wanted))
        self._request = np.arange(live) // share
        within = np.arange(live) - self._request * share
        base = self._rng.integers(0, max(1, min(span, g.max_context - share + 1)), live)[self._request]
        self._position = base + within
        same = self._key.program in ("prefill", "prelude")
        self._loop = np.zeros(live, int) if same else self._rng.integers(0, self._model.loops, live)
        if self._key.program == "kv_copy":
            self._loop = self._rng.integers(1, self._model.loops + 1, live)
        self._tables = np.full((g.max_requests, g.table_width), -1, np.int32)
        free = self._rng.permutation(kv_blocks).tolist()
        self._filled = np.zeros(kv_blocks, int)
        for request in np.unique(self._request):
            length = int(self._position[self._request == request].max()) + 1
            for index in range(-(-length // g.block_size)):
                block = free.pop()
                self._tables[request, index] = block
                self._filled[block] = min(g.block_size, length - index * g.block_size)

    def _inputs(self) -> list[RowInput]:
        """Every other row is new to its slot, the others keep what the state holds."""
        rows = [RowInput(-1)] * self._bucket
        for at, i in enumerate(self._rows):
            slot, token = int(self._slots[i]), int(self._rng.integers(self._model.vocab_size))
            request, position = int(self._request[at]), int(self._position[at])
            block = int(self._tables[request, position // self._geometry.block_size])
            kept = at % 2 == 1
            rows[i] = RowInput(slot) if kept else RowInput(slot, token, position, request, block)
        return rows

    def _write_state(self, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
        g, m = self._geometry, self._model
        state = np.full((g.slots, RECORD), -1, np.int32)
        for at, i in enumerate(self._rows):
            slot = self._slots[i]
            state[slot, Row.SLOT] = slot
            state[slot, Row.POSITION] = self._position[at]
            state[slot, Row.LOOP] = self._loop[at]
            state[slot, Row.REQUEST] = self._request[at]
            state[slot, Row.TOKEN] = self._rng.integers(m.vocab_size)
        alive = self.slots
        if self._references is not None:
            self._references.enter(state, alive.tolist())
        hidden = np.empty((g.slots, m.hidden_size), DTYPES[m.dtype].storage)
        hidden.view(np.uint8)[:] = POISON
        hidden[alive] = self._random(m.dtype, (len(alive), m.hidden_size))
        gates = np.full((g.slots, m.loops), np.nan, np.float32)
        gates[alive] = self._rng.standard_normal((len(alive), m.loops), np.float32)
        for name, value in (("row_state", state), ("hidden", hidden), ("gate_logits", gates), ("block_tables", self._tables)):
            memory.write(Pool.STATE, buffers[name].offset, value)

    def _write_samples(self, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
        """Logits for `sample` and tokens for `advance`, in the live rows."""
        if self._key.program == "sample":
            logits = np.full((self._bucket, self._model.vocab_size), np.nan, np.float32)
            logits[self._rows] = self._rng.standard_normal((len(self._rows), self._model.vocab_size), np.float32)
            memory.write(Pool.IO, buffers["logits"].offset, logits)
        if self._key.program == "advance":
            tokens = np.full(self._bucket, -1, np.int32)
            tokens[self._rows] = self._rng.integers(self._model.vocab_size, size=len(self._rows))
            memory.write(Pool.IO, buffers["tokens"].offset, tokens)

    def _write_kv(self, memory: Memory, kv: Buffer) -> None:
        """Keys and values at the positions that requests have; everything else in the pool is poisoned.

        Little of this comes from the host: one random pattern is spread over the pool where it is, then poisoned in part.
        """
        m, g = self._model, self._geometry
        item = DTYPES[m.dtype].bytes
        block = 2 * m.kv_heads * g.block_size * m.head_dim * item
        plane_pitch, block_pitch = len(self._filled) * block, block
        if kv.shape[0] is LoadTimeValue.KV_BLOCKS:
            plane_pitch, block_pitch = block, m.planes * block
        pattern = self._random(m.dtype, (min(_PATTERN, memory.size(Pool.KV) // item),))
        memory.write(Pool.KV, 0, pattern)
        memory.repeat(Pool.KV, pattern.nbytes)
        line = g.block_size * m.head_dim * item
        for at, filled in enumerate(self._filled.tolist()):
            start, used = at * block_pitch, filled * m.head_dim * item
            if not used:
                memory.fill_lines(Pool.KV, start, plane_pitch, block, m.planes, POISON)
            elif used < line:
                for head in range(start, start + block, line):
                    memory.fill_lines(Pool.KV, head + used, plane_pitch, line - used, m.planes, POISON)

    def _random(self, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        values = self._rng.standard_normal(shape, np.float32)
        # bfloat16 is the upper half of float32.
        return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values


def blocks_needed(geometry: Geometry, rows: int | None = None, span: int = SPAN) -> int:
    """KV blocks that are enough for any scene of up to `rows` rows, by default of any bucket, and of `span`."""
    most = geometry.max_rows if rows is None else rows
    requests = min(geometry.max_requests, most)
    return most // geometry.block_size + requests * (span // geometry.block_size + 2)
