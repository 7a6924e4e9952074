"""Steps: what a scheduler runs. Every row of a step names its state slot; nothing else ties steps together.

A step is submitted, then collected. Whole steps are `prefill` and `decode`; a scheduler with rounds of its own (speculation,
pipelines, rows of different loops in one batch) makes them of `describe`, `run` and `collect`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
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
from ouro_build.runtime.dispatch import Dispatcher, padded_to, replays_of
from ouro_build.runtime.memory import Memory, Pending
from ouro_build.runtime.references import ReferencePool, clear_slots
from ouro_build.runtime.retained_mass import RetainedMass
from ouro_build.runtime.row_modes import RowModes

T = TypeVar("T")
N = TypeVar("N", np.int32, np.float32)


@dataclass(frozen=True)
class Sampled:
    """What a step chose: `tokens` int32 [rows], and `logits` float32 [rows, vocab] where they were asked for."""

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32] | None


class Submitted:
    """A step whose choices are on their way to the host; no later step changes them."""

    def __init__(
        self, tokens: Sequence[Pending], logits: Sequence[Pending] | None, vocab_size: int, arrived: Callable[[], None]
    ) -> None:
        self._tokens = tokens
        self._logits = logits
        self._vocab_size = vocab_size
        self._arrived = arrived

    def result(self) -> Sampled:
        """Wait for the step, and for none submitted after it. May be called again. Raises DeviceError if it failed."""
        tokens = _joined(self._tokens, np.int32)
        logits = None if self._logits is None else _joined(self._logits, np.float32).reshape(-1, self._vocab_size)
        self._arrived()
        return Sampled(tokens, logits)


class Steps:
    """Runs prompt chunks and decode steps over a worker's pools.

    For a worker that has its own scheduler: it owns slots, KV blocks and requests, and says in each row what changes.
    Slots below `geometry.decode_slots` outlive a step; those from there to `geometry.slots` serve the rows of one prompt
    chunk. KV blocks are numbered from 0 to `kv_blocks` - 1, block tables from 0 to `geometry.max_requests` - 1.

    One request, in slot 0 with block table 0 and blocks 0, 1, …; the last row of its prompt runs in the slot that decodes:

        size, chunk, first = steps.geometry.block_size, steps.geometry.prefill_buckets[-1], steps.geometry.decode_slots
        block = lambda at: at // size if at % size == 0 else -1
        rows = [RowInput(first + at % chunk, token, at, request=0, block=block(at)) for at, token in enumerate(prompt)]
        rows[-1] = rows[-1]._replace(slot=0)
        tokens = [*steps.prefill(rows, finished=[0]).tokens]
        for at in range(len(prompt), len(prompt) + 15):
            tokens += [*steps.decode([RowInput(0, block=block(at))]).tokens]

    What is submitted runs in order; only `result`, `collect`, `prefill`, `decode`, `coda` and `state` wait. State advances on
    the device: a row that keeps its slot needs no token from the host, so the next step may be submitted before this one
    is read:

        step = steps.submit_decode(rows)
        while ...:
            following = steps.submit_decode([RowInput(slot, block=...) for slot in ...])  # runs while the host reads
            tokens, step = step.result().tokens, following

    The device keeps positions and block tables, and trusts them: blocks must be bound before a row reaches them, and stay so.
    A row that never started, has no block at its position or has reached `geometry.max_context` is left out; what is returned
    for it means nothing.

    Rows are dense unless they are told otherwise. A sparse row has a reference slot and Mode.CAPTURE, named once:

        (lease,) = steps.references.bind(request)
        RowInput(0, block=..., mode=Mode.CAPTURE, reference_slot=lease.slot, generation=lease.generation)
        steps.references.retire([lease])  # when the request has ended

    Each loop then runs in the mode that its rows need, `mixed` where they need different ones. `references` is None where rows
    remember nothing: without sparse modes, or where all keys are retained and no slot is needed.
    """

    def __init__(
        self,
        model: ModelConfig,
        geometry: Geometry,
        buffers: dict[str, Buffer],
        memory: Memory,
        dispatcher: Dispatcher,
        coverage: CoverageCounter,
        *,
        retained_mass: bool = False,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.buffers = buffers
        self._memory = memory
        self._dispatcher = dispatcher
        self._coverage = coverage
        # A batch of either kind has a prelude.
        every = tuple(sorted({*geometry.buckets, *geometry.prefill_buckets}))
        self._buckets = {"prelude": every, "prefill": geometry.prefill_buckets}
        _check_buffers(buffers, model, geometry)
        self.kv_blocks = memory.size(Pool.KV) // geometry.block_bytes(model)
        self._inputs = StepInputs(buffers, row_limits(model, geometry, self.kv_blocks))
        self.references: ReferencePool | None = None
        self.retained_mass: RetainedMass | None = None
        if geometry.references:
            self.references = ReferencePool(geometry.reference_slots, partial(clear_slots, memory, buffers))
            if retained_mass:
                self.retained_mass = RetainedMass(memory, buffers["reference_mass"])
        self._modes = RowModes(model.loops, self.references)

    def decode(self, rows: Sequence[RowInput], *, depth: int | None = None, logits: bool = False) -> Sampled:
        """`submit_decode`, waited for."""
        return self.submit_decode(rows, depth=depth, logits=logits).result()

    def prefill(self, rows: Sequence[RowInput], finished: Sequence[int] = (), *, logits: bool = False) -> Sampled:
        """`submit_prefill`, waited for."""
        return self.submit_prefill(rows, finished, logits=logits).result()

    def submit_decode(self, rows: Sequence[RowInput], *, depth: int | None = None, logits: bool = False) -> Submitted:
        """One token for each of `rows`: embed, run `depth` loops (default all), sample, advance.

        More rows than the largest bucket are run in several parts. Raises RequestError for what cannot be served,
        DeviceError if it cannot be submitted.
        """
        loops = self.loops(depth)
        parts = _parts(rows, self.geometry.buckets)
        # The planes of skipped loops are filled from the row's position, which advance moves on.
        skipped = ("kv_copy",) if loops < self.model.loops else ()
        reads, modes = [], []
        every: set[str] = set()
        for part in parts:
            self.describe(part, [row.slot for row in part])
            self.run("prelude", len(part))
            modes = [self.run_loop(len(part)) for _ in range(loops)]
            every.update(modes)
            for program in ("coda", "sample", *skipped, "advance"):
                self.run(program, len(part))
            reads.append(self._read_sampled(len(part), logits))
        if len(parts) > 1:
            for mode, count in Counter(modes).items():
                self._coverage.fallback(Reason.BUCKET_MISS, "recurrent", mode, len(rows), "split", count)
        if parts:
            self._coverage.step(every.pop() if len(every) == 1 else "sparse", len(rows), loops)
        return self._submitted(reads, logits)

    def submit_prefill(self, rows: Sequence[RowInput], finished: Sequence[int] = (), *, logits: bool = False) -> Submitted:
        """Run prompt rows through every loop, then sample for the slots in `finished`, whose prompts end here.

        A request's rows are adjacent and ascending. Rows past the largest prefill bucket are run in several parts. Raises
        as `submit_decode` does.
        """
        parts, ends = _parts(rows, self.geometry.prefill_buckets), _parts(finished, self.geometry.buckets)
        if len(parts) > 1:
            self._coverage.fallback(Reason.BUCKET_MISS, "prefill", "dense", len(rows), "split", self.model.loops)
        for at, part in enumerate(parts):
            # The first slots to sample for are named with the last rows: one copy describes a step.
            self.describe(part, ends[0] if ends and at == len(parts) - 1 else ())
            self.run("prelude", len(part))
            for _ in range(self.model.loops):
                self.run("prefill", len(part))
        reads = []
        for at, slots in enumerate(ends):
            if at or not parts:
                self.describe_coda(slots)
            for program in ("coda", "sample", "advance"):
                self.run(program, len(slots))
            reads.append(self._read_sampled(len(slots), logits))
        return self._submitted(reads, logits)

    def coda(self, slots: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the slots' hidden states, float32 [len(slots), vocab]. The batch of rows stays as it is described."""
        reads = []
        for part in _parts(slots, self.geometry.buckets):
            self.describe_coda(part)
            self.run("coda", len(part))
            reads.append(self._read("logits", len(part)))
        return _joined(reads, np.float32).reshape(-1, self.model.vocab_size)

    def describe(self, rows: Sequence[RowInput], coda: Sequence[int] = ()) -> None:
        """Make `rows` the batch and `coda` the slots to sample for, after the work already submitted: one copy.

        The program `prelude` applies the rows' inputs; the others read the batch or the slots. Raises RequestError, and
        submits nothing, for more of them than there is room for and for values that nothing has.
        """
        self._modes.check(rows)
        self._inputs.write(self._memory, rows, coda)
        self._modes.describe(rows, coda)

    def describe_coda(self, coda: Sequence[int]) -> None:
        """Make `coda` the slots to sample for and leave the batch as it is. Raises RequestError as `describe` does."""
        self._inputs.write_coda(self._memory, coda)
        self._modes.describe_coda(coda)

    def run_loop(self, rows: int) -> str:
        """Submit the next loop of `rows` rows of the batch in the mode that they need, which is returned.

        That is `dense`, `capture` or `consume` where all of them do the same in it, else `mixed`. Raises as `run` does.
        """
        mode, variant = self._modes.next_loop(self._bucket("recurrent", rows))
        self.run("recurrent", rows, mode, variant)
        return mode

    def run(self, program: str, rows: int, mode: str = "dense", variant: str = "") -> None:
        """Submit one run of `program` for `rows` rows of the batch (of the coda slots: `coda`, `sample`, `advance`, `kv_copy`).

        `rows` are padded to the next bucket and counted as live. Raises RequestError for more than the largest bucket, for a
        program or mode that nothing here can run, and for rows that would consume a reference that is not theirs, DeviceError
        if it cannot be submitted.
        """
        bucket = self._bucket(program, rows)
        captured = self._modes.begin_loop(bucket, mode, variant) if program == "recurrent" else ()
        self._dispatcher.run(ProgramKey(program, bucket, mode, variant), rows)
        self._modes.ran(program, bucket)
        if self.retained_mass is not None:
            self.retained_mass.captured(captured)

    def collect(self, rows: int, logits: bool = False) -> Sampled:
        """What the last `sample` chose for the first `rows` coda slots. Waits. Raises as `collect_later` does."""
        return self.collect_later(rows, logits).result()

    def collect_later(self, rows: int, logits: bool = False) -> Submitted:
        """Submit the copy of those choices to the host, so that another step may be submitted before they are read.

        Raises RequestError for more rows than the largest bucket, DeviceError if the device fails.
        """
        largest = self.geometry.buckets[-1]
        if not 0 <= rows <= largest:
            raise RequestError(f"{rows} rows, a step samples for 0 … {largest}", where="collect")
        return self._submitted([self._read_sampled(rows, logits)], logits)

    def state(self, name: str) -> NDArray[np.generic]:
        """A copy of a whole state buffer, bfloat16 as its bits: row_state, hidden, gate_logits, exit_probability, …"""
        buffer = self.buffers[name]
        raw = self._memory.read(buffer.pool, buffer.offset, buffer.bytes)
        return raw.view(DTYPES[buffer.dtype].storage).reshape(buffer.sizes)

    def loops(self, depth: int | None) -> int:
        """Loops that a token of `depth` gets: all of them for None. Raises RequestError for a depth that the model has not."""
        loops = self.model.loops if depth is None else depth
        if not 1 <= loops <= self.model.loops:
            raise RequestError(f"depth {loops} is outside 1 … {self.model.loops}")
        return loops

    def _bucket(self, program: str, rows: int) -> int:
        buckets = self._buckets.get(program, self.geometry.buckets)
        bucket = padded_to(rows, buckets)
        if bucket is None:
            raise RequestError(
                f"{rows} rows, the largest bucket of {program} is {buckets[-1]}", hint="Run them in several parts."
            )
        return bucket

    def _read_sampled(self, rows: int, logits: bool) -> tuple[Pending, Pending | None]:
        return self._read("tokens", rows), self._read("logits", rows) if logits else None

    def _submitted(self, reads: Sequence[tuple[Pending, Pending | None]], logits: bool) -> Submitted:
        kept = [values for _, values in reads if values is not None]
        tokens = [tokens for tokens, _ in reads]
        # Where nothing is read, nothing is waited for.
        arrived = self._arrival() if reads else lambda: None
        return Submitted(tokens, kept if logits else None, self.model.vocab_size, arrived)

    def _arrival(self) -> Callable[[], None]:
        """What to do once all work that was submitted so far is known to have finished."""
        references, mass = self.references, self.retained_mass
        ticket = 0 if references is None else references.submitted()
        copies = 0 if mass is None else mass.submitted

        def arrived() -> None:
            if references is not None:
                references.finished(ticket)
            if mass is not None:
                mass.take(copies)

        return arrived

    def _read(self, name: str, count: int) -> Pending:
        buffer = self.buffers[name]
        return self._memory.read_later(Pool.IO, buffer.offset, buffer.bytes // buffer.sizes[0] * count)


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


def _parts(rows: Sequence[T], buckets: Sequence[int]) -> list[Sequence[T]]:
    """The rows of each replay."""
    if len(rows) <= buckets[-1]:
        return [rows] if rows else []
    sizes = [r.rows for r in replays_of(len(rows), buckets) for _ in range(r.times)]
    return [rows[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _joined(reads: Sequence[Pending], dtype: type[N]) -> NDArray[N]:
    return np.concatenate([np.empty(0, dtype), *(read.result().view(dtype) for read in reads)])
