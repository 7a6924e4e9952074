"""Makes the oracle: runs the reference, on the CPU, over the very plans that the artifact will hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.columns import Columns, PlanIndex
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.oracle import Oracle, margin_units
from ouro_build.artifacts.packing import WeightSource
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.records import Reason
from ouro_build.artifacts.weight_stream import load_packed
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.reference import ReferenceExecutor, require_torch
from ouro_build.runtime.step import Steps

PROMPT_LENGTH = 16
NEW_TOKENS = 16
_STRIDE = 2654435761  # of Knuth's multiplicative hashing: spreads the prompt's ids over any vocabulary


def oracle_prompt(vocab_size: int, length: int = PROMPT_LENGTH) -> tuple[int, ...]:
    """Token ids that depend on the vocabulary's size alone: no tokenizer takes part."""
    return tuple((i + 1) * _STRIDE % vocab_size for i in range(length))


def make_oracle(
    model: ModelConfig,
    geometry: Geometry,
    part: Part,
    plans: tuple[PlanIndex, Columns],
    pools: dict[Pool, int],
    weights: WeightSource,
) -> Oracle:
    """Continue the prompt greedily by the reference. `pools` are the bytes of the pools of fixed size.

    Prompt and answer are shortened where `geometry.max_context` is too small for them.
    """
    length = min(PROMPT_LENGTH, geometry.max_context // 2)
    new = min(NEW_TOKENS, geometry.max_context - length)
    request = Request(oracle_prompt(model.vocab_size, length), new, keep_logits=True)
    blocks = -(-(length + new) // geometry.block_size)
    memory = HostMemory({**pools, Pool.KV: blocks * geometry.block_bytes(model)})
    with _one_thread():
        for offset, data in load_packed(weights, model):
            memory.write(Pool.WEIGHTS, offset, data)
        steps = reference_steps(model, geometry, part, plans, memory, blocks, CoverageCounter())
        engine = Engine(steps, blocks, 1)
        engine.submit(request)
        engine.run()
    return Oracle(
        prompt_ids=tuple(request.prompt),
        greedy_ids=tuple(request.ids),
        margins=tuple(_margin(row) for row in request.logits),
    )


def reference_steps(
    model: ModelConfig,
    geometry: Geometry,
    part: Part,
    plans: tuple[PlanIndex, Columns],
    memory: HostMemory,
    blocks: int,
    coverage: CoverageCounter,
) -> Steps:
    """Steps by the reference over plans that are in no artifact yet; `memory` has `blocks` KV blocks."""
    index, columns = plans
    values = load_time_values(model, geometry, blocks, part.sm_count)
    executor = ReferenceExecutor(index, columns, memory, values)
    dispatcher = Dispatcher((executor,), coverage, Reason.NO_DEVICE, {})
    memory.fill(Pool.STATE, 0xFF)
    memory.fill(Pool.IO, 0xFF)
    return Steps(model, geometry, {b.name: b for b in index.buffers}, memory, dispatcher, coverage)


def _margin(logits: NDArray[np.float32]) -> int:
    second, first = np.sort(logits)[-2:] if len(logits) > 1 else (logits[0], logits[0])
    return margin_units(float(first - second))


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch sums in an order that depends on the number of threads."""
    torch = require_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
