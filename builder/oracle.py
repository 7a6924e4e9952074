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
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.weight_stream import load_packed
from ouro_build.builder.buffers import kv_layout, make_buffers
from ouro_build.builder.planner import place
from ouro_build.builder.programs import Programs
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.reference import ReferenceExecutor, UnbuiltModes, require_torch
from ouro_build.runtime.references import fill_references
from ouro_build.runtime.selftest import clear_margin
from ouro_build.runtime.step import Steps

DTYPE = "float32"
"""In which the oracle is computed."""
PROMPT_LENGTH = 16
NEW_TOKENS = 16
PROMPTS = 8
"""Prompts that are continued side by side, of which one becomes the oracle."""
_STRIDE = 2654435761  # of Knuth's multiplicative hashing: spreads the prompt's ids over any vocabulary


def oracle_prompt(vocab_size: int, length: int = PROMPT_LENGTH, index: int = 0) -> tuple[int, ...]:
    """Token ids that depend on the vocabulary's size and `index` alone: no tokenizer takes part."""
    return tuple((index * length + i + 1) * _STRIDE % vocab_size for i in range(length))


def make_oracle(model: ModelConfig, geometry: Geometry, part: Part, weights: WeightSource) -> Oracle:
    """Continue some prompts greedily by the reference and keep the one that tells most, the first of equals.

    It has clear choices, no near ties, and the most different tokens among the clear ones, as far as there is such a prompt.
    One alone may lack them: a deep model in bfloat16 has few clear choices.

    `weights` are those of `model`, in its dtype. Of `geometry` the block size counts, and `max_context`: prompts and answers
    are shortened where it is too small for them. Takes memory for the weights in float32, twice the bytes of bfloat16 ones.
    """
    length = min(PROMPT_LENGTH, geometry.max_context // 2)
    new = min(NEW_TOKENS, geometry.max_context - length)
    prompts = [oracle_prompt(model.vocab_size, length, i) for i in range(PROMPTS)]
    requests = [Request(prompt, new, keep_logits=True) for prompt in prompts]
    shapes = Geometry(
        buckets=(PROMPTS,),
        prefill_buckets=(PROMPTS * length,),
        max_context=length + new,
        max_requests=PROMPTS,
        block_size=geometry.block_size,
    )
    wide = msgspec.structs.replace(model, dtype=DTYPE)
    with _one_thread():
        steps = recorded_steps(wide, shapes, part, WidenedWeights(weights, model))
        engine = Engine(steps, PROMPTS * shapes.table_width, PROMPTS)
        for request in requests:
            engine.submit(request)
        engine.run()
    return max(map(_oracle, requests), key=lambda oracle: _told(oracle, clear_margin(model)))


def _told(oracle: Oracle, margin: float) -> tuple[bool, bool, int, int]:
    """What makes one oracle better than another, the weightiest first."""
    clear = oracle.clear(margin)
    # A choice that leads by less than a unit could fall otherwise on another CPU, and all after it with it.
    steady = min(oracle.margins) > 0
    return bool(clear), steady, len(set(clear)), len(clear)


def _oracle(request: Request) -> Oracle:
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


def recorded_steps(
    model: ModelConfig, geometry: Geometry, part: Part, weights: WeightSource, *, retained_mass: bool = False
) -> Steps:
    """Steps by the reference over programs recorded for nothing else, with room for every request of `geometry`."""
    buffers = make_buffers(model, geometry, weight_buffers(model))
    placement = place(Programs(model, geometry, part, buffers).record(), buffers)
    blocks = geometry.max_requests * geometry.table_width
    memory = HostMemory({**placement.pools, Pool.KV: blocks * geometry.block_bytes(model)})
    for offset, data in load_packed(weights, model):
        memory.write(Pool.WEIGHTS, offset, data)
    plans = encode(placement.plans, placement.buffers, ())
    return reference_steps(model, geometry, part, plans, memory, blocks, CoverageCounter(), retained_mass=retained_mass)


def reference_steps(
    model: ModelConfig,
    geometry: Geometry,
    part: Part,
    plans: tuple[PlanIndex, Columns],
    memory: HostMemory,
    blocks: int,
    coverage: CoverageCounter,
    kv_axes: tuple[str, ...] = KV_AXES,
    *,
    retained_mass: bool = False,
) -> Steps:
    """Steps by the reference over plans that are in no artifact yet; `memory` has `blocks` KV blocks."""
    index, columns = plans
    values = load_time_values(kv_layout(model, geometry, kv_axes), blocks, part.sm_count)
    executor = ReferenceExecutor(index, columns, memory, values)
    unbuilt = UnbuiltModes(index, columns, memory, values, geometry=geometry)
    dispatcher = Dispatcher((executor,), coverage, Reason.NO_DEVICE, {}, unbuilt)
    memory.fill(Pool.STATE, 0xFF)
    memory.fill(Pool.IO, 0xFF)
    buffers = {b.name: b for b in index.buffers}
    if geometry.references:
        fill_references(memory, buffers, retained_counts(geometry.max_context, geometry.key_retention))
    return Steps(model, geometry, buffers, memory, dispatcher, coverage, retained_mass=retained_mass)


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
