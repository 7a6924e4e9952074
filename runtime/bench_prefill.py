"""A whole prompt to be measured: through the prefill buckets in chunks, as the engine runs it when it is alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.records import PromptLine
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.bench_step import UNSET, blocks_of, steps_over
from ouro_build.runtime.dispatch import replays_of
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.numbers import check_range
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.snapshots import Snapshot
from ouro_build.runtime.step import Steps
from ouro_build.runtime.timing import measure
from ouro_build.runtime.trial import Compared

FLAG = "--prefill"


class Prompt:
    """The prefill of one prompt of `tokens` tokens: for each chunk prelude and every loop, then the coda of the last row.

    `parts` are the rows of its chunks. Its KV blocks lie anywhere in the pool.
    """

    def __init__(self, model: ModelConfig, geometry: Geometry, pools: Pools, tokens: int) -> None:
        self._model, self._geometry, self._pools = model, geometry, pools
        ids = np.random.default_rng(1).integers(model.vocab_size, size=tokens).tolist()
        blocks = np.random.default_rng(0).permutation(pools.kv_blocks)[: blocks_of(geometry, tokens)].tolist()
        most = geometry.prefill_buckets[-1]
        rows = [self._row(at, at % most, token, blocks) for at, token in enumerate(ids)]
        rows[-1] = rows[-1]._replace(slot=0)
        self.parts = [rows[at : at + most] for at in range(0, tokens, most)]
        self._clear()
        self._steps = steps_over(model, geometry, pools, pools.executors)

    def run(self, steps: Steps | None = None) -> None:
        """Submit the whole prefill."""
        steps = steps or self._steps
        for part in self.parts:
            steps.describe(part, [0] if part is self.parts[-1] else ())
            steps.run("prelude", len(part))
            for _ in range(self._model.loops):
                steps.run("prefill", len(part))
        steps.run("coda", 1)

    def seconds(self) -> list[float]:
        """Seconds a prefill, of several batches of prefills between two synchronisations."""
        return measure(self.run, self._pools.memory.synchronize)

    def compare(self, snapshot: Snapshot) -> Compared:
        """Run the prefill by every executor that is here (by one alone, twice), from pools that hold nothing but poison.

        All must leave the same KV, state and outputs, in every byte; `snapshot`, of these pools, sees it. Logits that are not
        finite count as a difference.
        """
        executors = self._pools.executors
        first, *others = executors if len(executors) > 1 else [*executors, *executors]
        self._run_cleared(first)
        snapshot.take()
        right = True
        for other in others:
            self._run_cleared(other)
            right &= snapshot.same()
        logits = self._steps.collect(1, logits=True).logits
        right &= logits is not None and bool(np.isfinite(logits).all())
        return Compared(1, tuple(e.name for e in executors), right, None)

    def _run_cleared(self, executor: Executor) -> None:
        self._clear()
        self.run(steps_over(self._model, self._geometry, self._pools, [executor]))

    def _clear(self) -> None:
        for pool in (Pool.KV, Pool.STATE, Pool.IO):
            self._pools.memory.fill(pool, UNSET)

    def _row(self, position: int, at: int, token: int, blocks: Sequence[int]) -> RowInput:
        index, within = divmod(position, self._geometry.block_size)
        return RowInput(self._geometry.decode_slots + at, token, position, 0, -1 if within else blocks[index])


def prompt_bucket(geometry: Geometry, tokens: int) -> int:
    """The bucket that the first chunk of a prompt of `tokens` tokens runs in."""
    return _bucket(geometry, min(tokens, geometry.prefill_buckets[-1]))


def prompt_keys(geometry: Geometry, lengths: Sequence[int]) -> list[ProgramKey]:
    """The programs that take nearly all of the prefill of prompts of `lengths` tokens."""
    most = geometry.prefill_buckets[-1]
    chunks = {min(most, length) for length in lengths} | {length % most or most for length in lengths}
    buckets = sorted({_bucket(geometry, rows) for rows in chunks})
    return [*(ProgramKey("prefill", bucket) for bucket in buckets), ProgramKey("coda", geometry.buckets[0])]


def check_prompt(geometry: Geometry, tokens: int, kv_blocks: int) -> None:
    """Raise UsageError unless a prompt of `tokens` tokens can be run with `kv_blocks` KV blocks."""
    if not geometry.prefill_buckets:
        raise UsageError("the artifact has no programs for prompts", where=FLAG, hint="Build with --prefill-buckets.")
    check_range(tokens, geometry.max_context, FLAG, "a larger --max-context")
    needed = blocks_of(geometry, tokens)
    if needed > kv_blocks:
        what = f"a prompt of {tokens} tokens needs {needed} KV blocks, there is room for {kv_blocks} here"
        raise UsageError(what, where=FLAG, hint="Take a shorter prompt.")


def prompt_flop(model: ModelConfig, tokens: int) -> int:
    """Floating-point operations of the model in the prefill of a prompt, a multiplication and an addition counted as two.

    Those of the matrices, of the causal half of attention and of one row's LM head; norms, rotations, gates and softmax
    are left out, and so are padded rows.
    """
    m = model
    matrices = m.hidden_size * m.qkv_size + m.query_size * m.hidden_size + 3 * m.hidden_size * m.intermediate_size
    pairs = tokens * (tokens + 1) // 2
    layer = 2 * tokens * matrices + 4 * m.query_size * pairs
    return m.loops * m.layers * layer + 2 * m.vocab_size * m.hidden_size


def make_prompt_line(model: ModelConfig, geometry: Geometry, tokens: int, ms: float) -> PromptLine:
    """What the prefill of a prompt that takes `ms` milliseconds amounts to."""
    most = geometry.prefill_buckets[-1]
    flop = prompt_flop(model, tokens)
    return PromptLine(
        tokens=tokens,
        bucket=prompt_bucket(geometry, tokens),
        chunks=-(-tokens // most),
        ms=ms,
        tokens_s=tokens / ms * 1e3,
        flop=flop,
        tflop_s=flop / ms / 1e9,
    )


def _bucket(geometry: Geometry, rows: int) -> int:
    return replays_of(rows, geometry.prefill_buckets)[0].bucket
