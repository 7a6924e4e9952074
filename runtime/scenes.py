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
_SPAN = 20
"""Tokens of context that a made-up request may have before its rows of the batch."""
_PATTERN = 1 << 22
"""Random elements that keys and values repeat, each plane `_SHIFT` further on."""
_SHIFT = 7919


def live_patterns(bucket: int) -> tuple[tuple[bool, ...], ...]:
    """Which rows of a bucket live: every arrangement of a small bucket, else full, ends, every other, and two random ones."""
    if bucket <= 3:
        return tuple(tuple(bool(bits >> i & 1) for i in range(bucket)) for bits in range(1, 1 << bucket))
    rng = np.random.default_rng(bucket)
    masks = [[True] * bucket, [i == 0 for i in range(bucket)], [i == bucket - 1 for i in range(bucket)]]
    masks += [[i % 2 == 1 for i in range(bucket)], *(rng.random((2, bucket)) < 0.6).tolist()]
    return tuple(dict.fromkeys(tuple(map(bool, m)) for m in masks if any(m)))


class Scene:
    """A state for `key` with the rows of `live` in it. `kv_blocks` must be at least `blocks_needed`."""

    def __init__(
        self, model: ModelConfig, geometry: Geometry, key: ProgramKey, live: Sequence[bool], kv_blocks: int, seed: int = 0
    ) -> None:
        self._model, self._geometry, self._key = model, geometry, key
        self._seed = [seed, key.bucket, sum(live)]
        self._rng = np.random.default_rng(self._seed)
        most = min(geometry.max_requests * geometry.max_context, room(key, geometry))
        self._rows = [i for i, alive in enumerate(live) if alive][:most]
        self._bucket = len(live)
        self._slots = self._rng.permutation(geometry.slots)[: self._bucket]
        self._place_rows(kv_blocks)
        self._references = row_references(self._rng, geometry, len(self._rows)) if geometry.references else None

    @property
    def slots(self) -> NDArray[np.int64]:
        """State slots of the live rows."""
        return self._slots[self._rows]

    def write(self, memory: Memory, buffers: Mapping[str, Buffer]) -> None:
        """Poison every pool but the weights, then put the state there; the same bytes every time."""
        self._rng = np.random.default_rng([*self._seed, 1])
        for pool in Pool:
            if pool is not Pool.WEIGHTS:
                memory.fill(pool, POISON)
        self._write_state(memory, buffers)
        self._write_kv(memory, buffers["kv"])
        if self._references is not None:
            at = self._position
            write_references(memory, buffers, self._model, self._geometry, self._references, at, self._rng)
        slots = [int(self._slots[i]) if i in self._rows else -1 for i in range(self._bucket)]
        inputs = StepInputs(buffers, row_limits(self._model, self._geometry, len(self._valid)))
        if self._bucket <= self._geometry.buckets[-1]:
            inputs.write(memory, self._inputs(), slots)
            self._write_samples(memory, buffers)
        else:
            inputs.write(memory, self._inputs(), ())

    def _place_rows(self, kv_blocks: int) -> None:
        """Give the live rows requests, positions, loops and blocks; rows of one request are adjacent and ascending."""
        g, live = self._geometry, len(self._rows)
        wanted = max(3 if self._key.program == "prefill" else live, -(-live // g.max_context))
        share = -(-live // min(g.max_requests, wanted))
        self._request = np.arange(live) // share
        within = np.arange(live) - self._request * share
        base = self._rng.integers(0, max(1, min(_SPAN, g.max_context - share + 1)), live)[self._request]
        self._position = base + within
        same = self._key.program in ("prefill", "prelude")
        self._loop = np.zeros(live, int) if same else self._rng.integers(0, self._model.loops, live)
        if self._key.program == "kv_copy":
            self._loop = self._rng.integers(1, self._model.loops + 1, live)
        self._tables = np.full((g.max_requests, g.table_width), -1, np.int32)
        free = self._rng.permutation(kv_blocks).tolist()
        self._valid = np.zeros((kv_blocks, g.block_size), bool)
        for request in np.unique(self._request):
            length = int(self._position[self._request == request].max()) + 1
            for index in range(-(-length // g.block_size)):
                block = free.pop()
                self._tables[request, index] = block
                self._valid[block, : min(g.block_size, length - index * g.block_size)] = True

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
        """Keys and values at the positions that requests have; everything else in the pool stays poisoned.

        A block of a plane holds the same whichever of the two is the outer one in the pool.
        """
        m, g = self._model, self._geometry
        blocks, block = len(self._valid), (2, m.kv_heads, g.block_size, m.head_dim)
        size = int(np.prod(block))
        pattern = self._random(m.dtype, (min(_PATTERN, blocks * size),))
        if kv.shape[0] is LoadTimeValue.KV_BLOCKS:
            within = np.arange(size) - _SHIFT * np.arange(m.planes)[:, None]
            for at in np.flatnonzero(self._valid.any(1)).tolist():
                values = pattern.take(at * size + within, mode="wrap").reshape(m.planes, *block)
                _write_kv_part(memory, at, values, self._valid[at, :, None])
        else:
            for plane in range(m.planes):
                values = np.resize(np.roll(pattern, _SHIFT * plane), (blocks, *block))
                _write_kv_part(memory, plane, values, self._valid[:, None, None, :, None])

    def _random(self, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        values = self._rng.standard_normal(shape, np.float32)
        # bfloat16 is the upper half of float32.
        return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values


def _write_kv_part(memory: Memory, at: int, values: NDArray[np.generic], valid: NDArray[np.bool_]) -> None:
    """Make `values`, poisoned where not `valid`, part `at` of the equal parts of the KV pool."""
    bits = values.view(f"<u{values.itemsize}")
    bits[~np.broadcast_to(valid, values.shape)] = (1 << 8 * values.itemsize) - 1
    memory.write(Pool.KV, at * values.nbytes, bits)


def blocks_needed(geometry: Geometry, rows: int | None = None) -> int:
    """KV blocks that are enough for any scene of up to `rows` rows, by default of any bucket."""
    most = geometry.max_rows if rows is None else rows
    requests = min(geometry.max_requests, most)
    return most // geometry.block_size + requests * (_SPAN // geometry.block_size + 2)
