"""Makes the oracle: runs the reference on the CPU, in float32, over the programs of the artifact's own model.

Float32 whatever the model's dtype: in bfloat16 the margins depend on the instructions with which a CPU sums, and two
builders of the same inputs would write different bytes. The weights are those that the artifact packs, widened exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.columns import Columns, PlanIndex, encode
from ouro_build.artifacts.convert import convert
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import KV_AXES
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.oracle import Oracle, margin_units
from ouro_build.artifacts.packing import PackedTensor, WeightSource, weight_buffers, weight_layout
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.records import Reason
from ouro_build.artifacts.weight_stream import load_packed
from ouro_build.builder.buffers import kv_layout, make_buffers
from ouro_build.builder.planner import place
from ouro_build.builder.programs import Programs
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.reference import ReferenceExecutor, require_torch
from ouro_build.runtime.step import Steps

DTYPE = "float32"
"""In which the oracle is computed."""
PROMPT_LENGTH = 16
NEW_TOKENS = 16
_STRIDE = 2654435761  # of Knuth's multiplicative hashing: spreads the prompt's ids over any vocabulary


def oracle_prompt(vocab_size: int, length: int = PROMPT_LENGTH) -> tuple[int, ...]:
    """Token ids that depend on the vocabulary's size alone: no tokenizer takes part."""
    return tuple((i + 1) * _STRIDE % vocab_size for i in range(length))


def make_oracle(model: ModelConfig, geometry: Geometry, part: Part, weights: WeightSource) -> Oracle:
    """Continue the prompt greedily by the reference. `weights` are those of `model`, in its dtype.

    Of `geometry` the block size counts, and `max_context`: prompt and answer are shortened where it is too small for them.
    Takes memory for the weights in float32, twice the bytes of a bfloat16 artifact's.
    """
    length = min(PROMPT_LENGTH, geometry.max_context // 2)
    new = min(NEW_TOKENS, geometry.max_context - length)
    request = Request(oracle_prompt(model.vocab_size, length), new, keep_logits=True)
    wide = msgspec.structs.replace(model, dtype=DTYPE)
    shapes = Geometry(
        buckets=(1,), prefill_buckets=(length,), max_context=length + new, max_requests=1, block_size=geometry.block_size
    )
    with _one_thread():
        engine = Engine(_steps(wide, shapes, part, WidenedWeights(weights, model)), shapes.table_width, 1)
        engine.submit(request)
        engine.run()
    return Oracle(
        prompt_ids=tuple(request.prompt),
        greedy_ids=tuple(request.ids),
        margins=tuple(_margin(row) for row in request.logits),
    )


class WidenedWeights:
    """The weights of `model` as it packs them, in float32: a `WeightSource` of the same model with that dtype."""

    def __init__(self, weights: WeightSource, model: ModelConfig) -> None:
        self.label = weights.label
        self._weights = weights
        self._packed = {tensor.name: tensor for tensor in weight_layout(model)}

    def read(self, tensor: PackedTensor, start: int, stop: int) -> NDArray[np.generic]:
        packed = self._packed[tensor.name]
        return convert(self._weights.read(packed, start, stop), packed.dtype, tensor.dtype)


def _steps(model: ModelConfig, geometry: Geometry, part: Part, weights: WeightSource) -> Steps:
    """Steps over programs recorded for nothing else, with room for one request."""
    buffers = make_buffers(model, geometry, weight_buffers(model))
    placement = place(Programs(model, geometry, part, buffers).record(), buffers)
    blocks = geometry.table_width
    memory = HostMemory({**placement.pools, Pool.KV: blocks * geometry.block_bytes(model)})
    for offset, data in load_packed(weights, model):
        memory.write(Pool.WEIGHTS, offset, data)
    plans = encode(placement.plans, placement.buffers, ())
    return reference_steps(model, geometry, part, plans, memory, blocks, CoverageCounter())


def reference_steps(
    model: ModelConfig,
    geometry: Geometry,
    part: Part,
    plans: tuple[PlanIndex, Columns],
    memory: HostMemory,
    blocks: int,
    coverage: CoverageCounter,
    kv_axes: tuple[str, ...] = KV_AXES,
) -> Steps:
    """Steps by the reference over plans that are in no artifact yet; `memory` has `blocks` KV blocks."""
    index, columns = plans
    values = load_time_values(kv_layout(model, geometry, kv_axes), blocks, part.sm_count)
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
