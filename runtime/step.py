"""Steps: what a scheduler runs. Every row of a step names its state slot; nothing else ties steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import ArtifactError, RequestError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.artifacts.records import Reason
from ouro_build.artifacts.rows import RECORD
from ouro_build.runtime.batch import RowInput, StepInputs, row_limits
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.memory import Memory

T = TypeVar("T")


@dataclass(frozen=True)
class Sampled:
    """What a step chose: `tokens` int32 [rows], and `logits` float32 [rows, vocab] where they were asked for."""

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32] | None


class Steps:
    """Runs prompt chunks and decode steps over a worker's pools.

    For a worker that has its own scheduler: it owns slots, KV blocks and requests, and says in each row what changes.
    Slots below `geometry.decode_slots` outlive a step; those above serve the rows of one prompt chunk.
    """

    def __init__(
        self,
        model: ModelConfig,
        geometry: Geometry,
        buffers: dict[str, Buffer],
        memory: Memory,
        dispatcher: Dispatcher,
        coverage: CoverageCounter,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self._buffers = buffers
        self._memory = memory
        self._dispatcher = dispatcher
        self._coverage = coverage
        _check_buffers(buffers, model, geometry)
        kv_blocks = memory.size(Pool.KV) // geometry.block_bytes(model)
        self._inputs = StepInputs(buffers, row_limits(model, geometry, kv_blocks))

    def decode(
        self, rows: Sequence[RowInput], *, depth: int | None = None, mode: str = "dense", logits: bool = False
    ) -> Sampled:
        """One token for each of `rows`: embed, run `depth` loops (default all), sample, advance.

        More rows than the largest bucket are run in several parts. Raises DeviceError if the device fails.
        """
        loops = self.loops(depth)
        parts = _parts(rows, self.geometry.buckets[-1])
        if len(parts) > 1:
            self._coverage.fallback(Reason.BUCKET_MISS, "recurrent", mode, len(rows), "split", loops)
        return self._joined([self._decode_part(part, loops, mode, logits) for part in parts], logits)

    def prefill(self, rows: Sequence[RowInput], finished: Sequence[int] = (), *, logits: bool = False) -> Sampled:
        """Run prompt rows through every loop, then sample for the slots in `finished`, whose prompts end here.

        A request's rows are adjacent and ascending. Rows past the largest prefill bucket are run in several parts.
        """
        parts, ends = _parts(rows, self.geometry.prefill_buckets[-1]), _parts(finished, self.geometry.buckets[-1])
        if len(parts) > 1:
            self._coverage.fallback(Reason.BUCKET_MISS, "prefill", "dense", len(rows), "split", self.model.loops)
        for at, part in enumerate(parts):
            # The first slots to sample for are named with the last rows: one copy describes a step.
            self.start(part, ends[0] if ends and at == len(parts) - 1 else ())
            for _ in range(self.model.loops):
                self.prefill_loop(len(part))
        sampled = []
        for at, slots in enumerate(ends):
            if at or not parts:
                self._inputs.write_coda(self._memory, slots)
            sampled.append(self._sample(len(slots), ("coda", "sample", "advance"), logits))
        return self._joined(sampled, logits)

    def start(self, rows: Sequence[RowInput], coda: Sequence[int] = ()) -> None:
        """Make prompt `rows` the batch and `coda` the slots to sample for; apply the rows' inputs and embed their tokens."""
        self._inputs.write(self._memory, rows, coda)
        self._run("prelude", len(rows), self.geometry.prefill_buckets)

    def prefill_loop(self, rows: int) -> None:
        """One loop over the batch of `rows` prompt rows."""
        self._run("prefill", rows, self.geometry.prefill_buckets)

    def coda(self, slots: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the slots' hidden states, float32 [len(slots), vocab]."""
        out = [np.empty((0, self.model.vocab_size), np.float32)]
        for part in _parts(slots, self.geometry.buckets[-1]):
            self._inputs.write_coda(self._memory, part)
            self._run("coda", len(part), self.geometry.buckets)
            out.append(self._logits(len(part)))
        return np.concatenate(out)

    def state(self, name: str) -> NDArray[np.generic]:
        """A copy of a whole state buffer, bfloat16 as its bits: row_state, hidden, gate_logits, exit_probability, …"""
        buffer = self._buffers[name]
        raw = self._memory.read(buffer.pool, buffer.offset, buffer.bytes)
        return raw.view(DTYPES[buffer.dtype].storage).reshape(buffer.sizes)

    def loops(self, depth: int | None) -> int:
        """Loops that a token of `depth` gets: all of them for None. Raises RequestError for a depth that the model has not."""
        loops = self.model.loops if depth is None else depth
        if not 1 <= loops <= self.model.loops:
            raise RequestError(f"depth {loops} is outside 1 … {self.model.loops}")
        return loops

    def _decode_part(self, rows: Sequence[RowInput], loops: int, mode: str, logits: bool) -> Sampled:
        self._inputs.write(self._memory, rows, [row.slot for row in rows])
        self._run("prelude", len(rows), self.geometry.buckets)
        for _ in range(loops):
            self._run("recurrent", len(rows), self.geometry.buckets, mode)
        # The planes of skipped loops are filled from the row's position, which advance moves on.
        skipped = ("kv_copy",) if loops < self.model.loops else ()
        return self._sample(len(rows), ("coda", "sample", *skipped, "advance"), logits)

    def _sample(self, rows: int, programs: Sequence[str], logits: bool) -> Sampled:
        for program in programs:
            self._run(program, rows, self.geometry.buckets)
        tokens = self._read("tokens", rows).view(np.int32)
        return Sampled(tokens, self._logits(rows) if logits else None)

    def _joined(self, parts: Sequence[Sampled], logits: bool) -> Sampled:
        tokens = np.concatenate([np.empty(0, np.int32), *(p.tokens for p in parts)])
        if not logits:
            return Sampled(tokens, None)
        empty = np.empty((0, self.model.vocab_size), np.float32)
        return Sampled(tokens, np.concatenate([empty, *(p.logits for p in parts if p.logits is not None)]))

    def _run(self, program: str, rows: int, buckets: Sequence[int], mode: str = "dense") -> None:
        bucket = next((b for b in buckets if b >= rows), None)
        if bucket is None:
            raise RequestError(
                f"{rows} rows, the largest bucket of {program} is {buckets[-1]}", hint="Run them in several parts."
            )
        self._dispatcher.run(ProgramKey(program, bucket, mode), rows)

    def _logits(self, count: int) -> NDArray[np.float32]:
        return self._read("logits", count).view(np.float32).reshape(count, -1)

    def _read(self, name: str, count: int) -> NDArray[np.uint8]:
        buffer = self._buffers[name]
        return self._memory.read(Pool.IO, buffer.offset, buffer.bytes // buffer.sizes[0] * count)


def _check_buffers(buffers: Mapping[str, Buffer], model: ModelConfig, geometry: Geometry) -> None:
    """Raise ArtifactError unless the buffers that the host reads and writes are there, of the shapes that it takes them for."""
    rows, bucket = geometry.max_rows, geometry.buckets[-1]
    shapes = {
        "coda_batch": (bucket,),
        "batch": (rows,),
        "inputs": (rows, RECORD),
        "logits": (bucket, model.vocab_size),
        "tokens": (bucket,),
    }
    for name, shape in shapes.items():
        found = buffers.get(name)
        if found is None or found.pool is not Pool.IO or found.shape != shape:
            raise ArtifactError(f"buffer {name} of shape {shape} in io is expected, the plans have {found}", where="plans")


def _parts(rows: Sequence[T], largest: int) -> list[Sequence[T]]:
    return [rows[at : at + largest] for at in range(0, len(rows), largest)]
