"""A decode step to be measured: live rows at a context of one's choice, without the prompts that would lead there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.artifacts.rows import Mode
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.memory import Memory
from ouro_build.runtime.numbers import check_range
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.step import Steps
from ouro_build.runtime.timing import measure
from ouro_build.runtime.trial import Compared

READ = ProgramKey("read", 1)
ROWS_CONTEXT = ("--rows", "--context")
"""The flags that say a step's rows and context, where there is not one for both."""
_KV_BYTE = 0x3C
"""Every byte of keys and values: finite in every type, about 0.01."""
UNSET = 0xFF
"""Every byte of state, inputs and outputs that nothing was written to."""
_PATTERN = 4_194_301
"""Values until varied ones repeat: a prime, so that no two rows, planes or layers have the same at the same place."""


class DecodeStep:
    """Steps of `rows` rows, each a request of its own with `context` tokens, the one being decoded included.

    The host's inputs stay as they were written, so every prelude puts the rows back at `context` - 1. `sparse` rows capture
    in the source loop and consume in those after it; `retained_mass` also copies the masses of captures to the host. Keys and
    values are all alike unless they are to be `varied`, as sparse rows need them: they choose among the keys.
    """

    def __init__(
        self,
        model: ModelConfig,
        geometry: Geometry,
        pools: Pools,
        rows: int,
        context: int,
        *,
        sparse: bool = False,
        varied: bool = False,
        retained_mass: bool = False,
    ) -> None:
        self._model, self._geometry, self._pools = model, geometry, pools
        self.rows, self.context = rows, context
        self._sparse, self._retained_mass = sparse, retained_mass
        memory = pools.memory
        if varied:
            vary(memory, Pool.KV, model.dtype)
        else:
            memory.fill(Pool.KV, _KV_BYTE)
        memory.fill(Pool.STATE, UNSET)
        memory.fill(Pool.IO, UNSET)
        tables = self._tables()
        block_tables = next(buffer for buffer in pools.index.buffers if buffer.name == "block_tables")
        memory.write(Pool.STATE, block_tables.offset, tables)
        self._rows = self._inputs(tables)
        self._steps = self._over(pools.executors)

    def run(self, steps: Steps | None = None) -> None:
        """Submit the whole step."""
        steps = steps or self._steps
        steps.run("prelude", self.rows)
        for _ in range(self._model.loops):
            steps.run_loop(self.rows)
        for program in ("coda", "sample", "advance"):
            steps.run(program, self.rows)

    def start(self) -> None:
        """Submit only what puts the rows at their context, in loop 0."""
        self._steps.run("prelude", self.rows)

    def seconds(self) -> list[float]:
        """Seconds a step, of several batches of steps between two synchronisations."""
        return measure(self.run, self._pools.memory.synchronize)

    def mean_mass(self) -> float | None:
        """Mean retained mass of the captures so far, where they were copied."""
        mass = self._steps.retained_mass
        return None if mass is None else mass.record().mean

    def compare(self) -> Compared:
        """Run the step by every executor that is here (by one alone, twice): all must leave the same state and outputs.

        Logits that are not finite count as a difference.
        """
        executors = self._pools.executors
        runs = executors if len(executors) > 1 else [*executors, *executors]
        seen = [self._outcome(executor) for executor in runs]
        logits = self._steps.collect(self.rows, logits=True).logits
        right = logits is not None and bool(np.isfinite(logits).all()) and all(bits == seen[0] for bits in seen)
        return Compared(1, tuple(e.name for e in executors), right, None)

    def _outcome(self, executor: Executor) -> tuple[bytes, ...]:
        self.run(self._over([executor]))
        memory = self._pools.memory
        return tuple(memory.read(p, 0, memory.size(p)).tobytes() for p in (Pool.STATE, Pool.IO, Pool.REFERENCES))

    def _over(self, executors: Sequence[Executor]) -> Steps:
        steps = steps_over(self._model, self._geometry, self._pools, executors, retained_mass=self._retained_mass)
        steps.describe([self._sparse_row(steps, row) for row in self._rows], range(self.rows))
        return steps

    def _sparse_row(self, steps: Steps, row: RowInput) -> RowInput:
        """The row in the mode that it is to have, with a reference slot where it needs one."""
        if not self._sparse:
            return row
        row = row._replace(mode=Mode.CAPTURE)
        if steps.references is None:
            return row
        (lease,) = steps.references.bind(row.slot)
        return row._replace(reference_slot=lease.slot, generation=lease.generation)

    def _tables(self) -> NDArray[np.int32]:
        """Block tables: every request's blocks lie anywhere in the pool."""
        g = self._geometry
        each = blocks_of(g, self.context)
        blocks = np.random.default_rng(0).permutation(self._pools.kv_blocks)[: self.rows * each]
        tables = np.full((g.max_requests, g.table_width), -1, np.int32)
        tables[: self.rows, :each] = blocks.reshape(self.rows, each)
        return tables

    def _inputs(self, tables: NDArray[np.int32]) -> list[RowInput]:
        position = self.context - 1
        tokens = np.random.default_rng(1).integers(self._model.vocab_size, size=self.rows).tolist()
        blocks = tables[: self.rows, position // self._geometry.block_size].tolist()
        return [RowInput(row, tokens[row], position, row, blocks[row]) for row in range(self.rows)]


def vary(memory: Memory, pool: Pool, dtype: str) -> None:
    """Fill the pool with values of `dtype` from a standard normal distribution, which repeat after `_PATTERN`."""
    raw = _normal(dtype, _PATTERN)
    size = min(raw.nbytes, memory.size(pool))
    memory.write(pool, 0, raw[:size])
    memory.repeat(pool, size)


def vary_buffer(memory: Memory, buffer: Buffer) -> None:
    """Fill the buffer with such values."""
    memory.write(buffer.pool, buffer.offset, _normal(buffer.dtype, math.prod(buffer.sizes)))


def _normal(dtype: str, count: int) -> NDArray[np.uint8]:
    values = np.random.default_rng(2).standard_normal(count, np.float32)
    # bfloat16 is the upper half of float32.
    raw = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(DTYPES[dtype].storage)
    return raw.view(np.uint8)


def steps_over(
    model: ModelConfig, geometry: Geometry, pools: Pools, executors: Sequence[Executor], *, retained_mass: bool = False
) -> Steps:
    """Steps over `pools` by `executors`, the first that has a program runs it; what they count is not kept."""
    coverage = CoverageCounter()
    dispatcher = Dispatcher(executors, coverage, None, {})
    buffers = {buffer.name: buffer for buffer in pools.index.buffers}
    return Steps(model, geometry, buffers, pools.memory, dispatcher, coverage, retained_mass=retained_mass)


def blocks_of(geometry: Geometry, context: int) -> int:
    """KV blocks of one request of `context` tokens."""
    return -(-context // geometry.block_size)


def check_shape(geometry: Geometry, rows: int, context: int, kv_blocks: int, flags: tuple[str, str] = ROWS_CONTEXT) -> None:
    """Raise UsageError unless `rows` requests of `context` tokens each can run at once with `kv_blocks` KV blocks.

    It names `flags`, by which rows and context were given.
    """
    # One bucket, and a request a row.
    most = min(geometry.buckets[-1], geometry.max_requests)
    check_range(rows, most, flags[0], "larger --buckets and --max-requests", "a row count of ")
    check_range(context, geometry.max_context, flags[1], "a larger --max-context", "a context of ")
    needed = rows * blocks_of(geometry, context)
    if needed > kv_blocks:
        what = f"{rows} rows of {context} tokens need {needed} KV blocks, there is room for {kv_blocks} here"
        raise UsageError(what, where=", ".join(dict.fromkeys(flags)), hint="Take fewer rows, or a shorter context.")


def read_seconds(pools: Pools) -> list[float] | None:
    """Seconds of reading all weights once, of several batches; None if the artifact has no plan for that."""
    executor = next((e for e in pools.executors if e.has(READ)), None)
    return None if executor is None else measure(lambda: executor.run(READ), pools.memory.synchronize)


def read_rate(pools: Pools, nbytes: int) -> float | None:
    """TB/s of reading all weights, `nbytes`, once: the best of those batches; None as there."""
    seconds = read_seconds(pools)
    return None if seconds is None else nbytes / min(seconds) / 1e12
