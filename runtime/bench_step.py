"""A decode step to be measured: live rows at a context of one's choice, without the prompts that would lead there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.step import Steps
from ouro_build.runtime.timing import measure
from ouro_build.runtime.trial import Compared

READ = ProgramKey("read", 1)
_KV_BYTE = 0x3C
"""Every byte of keys and values: finite in every type, about 0.01."""
UNSET = 0xFF
"""Every byte of state, inputs and outputs that nothing was written to."""


class DecodeStep:
    """Steps of `rows` rows, each a request of its own with `context` tokens, the one being decoded included.

    The host's inputs stay as they were written, so every prelude puts the rows back at `context` - 1.
    """

    def __init__(self, model: ModelConfig, geometry: Geometry, pools: Pools, rows: int, context: int) -> None:
        self._model, self._geometry, self._pools = model, geometry, pools
        self.rows, self.context = rows, context
        memory = pools.memory
        memory.fill(Pool.KV, _KV_BYTE)
        memory.fill(Pool.STATE, UNSET)
        memory.fill(Pool.IO, UNSET)
        tables = self._tables()
        block_tables = next(buffer for buffer in pools.index.buffers if buffer.name == "block_tables")
        memory.write(Pool.STATE, block_tables.offset, tables)
        self._steps = steps_over(model, geometry, pools, pools.executors)
        self._steps.describe(self._inputs(tables), range(rows))

    def run(self, steps: Steps | None = None) -> None:
        """Submit the whole step."""
        steps = steps or self._steps
        steps.run("prelude", self.rows)
        for _ in range(self._model.loops):
            steps.run("recurrent", self.rows)
        for program in ("coda", "sample", "advance"):
            steps.run(program, self.rows)

    def seconds(self) -> list[float]:
        """Seconds a step, of several batches of steps between two synchronisations."""
        return measure(self.run, self._pools.memory.synchronize)

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

    def _outcome(self, executor: Executor) -> tuple[bytes, bytes]:
        self.run(steps_over(self._model, self._geometry, self._pools, [executor]))
        memory = self._pools.memory
        state, io = (memory.read(pool, 0, memory.size(pool)) for pool in (Pool.STATE, Pool.IO))
        return state.tobytes(), io.tobytes()

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


def steps_over(model: ModelConfig, geometry: Geometry, pools: Pools, executors: Sequence[Executor]) -> Steps:
    """Steps over `pools` by `executors`, the first that has a program runs it; what they count is not kept."""
    coverage = CoverageCounter()
    dispatcher = Dispatcher(executors, coverage, None, {})
    buffers = {buffer.name: buffer for buffer in pools.index.buffers}
    return Steps(model, geometry, buffers, pools.memory, dispatcher, coverage)


def blocks_of(geometry: Geometry, context: int) -> int:
    """KV blocks of one request of `context` tokens."""
    return -(-context // geometry.block_size)


def check_shape(geometry: Geometry, rows: int, context: int, kv_blocks: int) -> None:
    """Raise UsageError unless `rows` requests of `context` tokens each can run at once with `kv_blocks` KV blocks."""
    most = min(geometry.buckets[-1], geometry.max_requests)
    if not 1 <= rows <= most:
        hint = "Build with larger --buckets and --max-requests."
        raise UsageError(f"{rows} is outside 1 … {most}: one bucket, a request a row", where="--rows", hint=hint)
    if not 1 <= context <= geometry.max_context:
        hint = "Build with a larger --max-context."
        raise UsageError(f"{context} is outside 1 … {geometry.max_context}", where="--context", hint=hint)
    needed = rows * blocks_of(geometry, context)
    if needed > kv_blocks:
        what = f"{rows} rows of {context} tokens need {needed} KV blocks, there is room for {kv_blocks} here"
        raise UsageError(what, where="--rows, --context", hint="Take fewer rows, or a shorter context.")


def read_seconds(pools: Pools) -> list[float] | None:
    """Seconds of reading all weights once, of several batches; None if the artifact has no plan for that."""
    executor = next((e for e in pools.executors if e.has(READ)), None)
    return None if executor is None else measure(lambda: executor.run(READ), pools.memory.synchronize)
