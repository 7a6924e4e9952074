"""The oracle against the plain dense model in float32, and what it may depend on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.oracle import MARGIN_UNIT, Oracle
from ouro_build.artifacts.packing import WeightSource, weight_layout
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.presets import find_preset
from ouro_build.builder import oracle as oracle_module
from ouro_build.builder.oracle import PROMPTS, WidenedWeights, make_oracle, oracle_prompt
from ouro_build.builder.source import Source, open_source
from ouro_build.runtime.engine import Request
from ouro_build.runtime.selftest import clear_margin
from tests.dense_model import DenseModel
from tests.reference_worker import GOLDEN, reference_worker
from tests.unit.artifacts.blocks import logical

BFLOAT16 = str(GOLDEN / "mha-bf16")
H200 = find_part("h200")


def opened(model: str = BFLOAT16) -> Source:
    return open_source(model, dtype=None, seed=0)


def geometry(buckets: tuple[int, ...] = (1, 4), max_context: int = 128) -> Geometry:
    return Geometry(buckets=buckets, prefill_buckets=(16,), max_context=max_context, max_requests=buckets[-1], block_size=16)


def oracle_of(source: Source, shapes: Geometry | None = None, part: str = "h200") -> Oracle:
    return make_oracle(source.model, shapes or geometry(), find_part(part), source.weights)


def dense(source: Source) -> DenseModel:
    """The plain model in float32 on the weights that are packed."""
    wide = msgspec.structs.replace(source.model, dtype="float32")
    weights = {}
    for tensor in weight_layout(wide):
        values = (
            logical(tensor, WidenedWeights(source.weights, source.model).read(tensor, 0, tensor.elements)).reshape(-1)
            if tensor.sources
            else None
        )
        start = 0
        for part in tensor.sources:
            assert values is not None
            weights[part.name] = torch.from_numpy(values[start : start + part.elements].copy()).view(part.shape)
            start += part.elements
    return DenseModel(wide, weights)


@pytest.mark.parametrize("name", ["mha-bf16", "gqa-fp32"])
def test_it_is_what_the_dense_model_chooses_in_float32(name: str) -> None:
    source = opened(str(GOLDEN / name))
    oracle = oracle_of(source)
    ids = (*oracle.prompt_ids, *oracle.greedy_ids)
    logits = dense(source).forward(ids[:-1]).logits[-1, len(oracle.prompt_ids) - 1 :]
    top = logits.topk(2)
    assert oracle.prompt_ids in [oracle_prompt(source.model.vocab_size, index=i) for i in range(PROMPTS)]
    assert len(oracle.greedy_ids) == 16
    margins = (top.values[:, 0] - top.values[:, 1]).numpy()
    assert abs(margins * MARGIN_UNIT - np.array(oracle.margins) - 0.5).max() < 0.5 + 1e-4 * MARGIN_UNIT
    assert [c for c, m in zip(top.indices[:, 0].tolist(), margins, strict=True) if m > 1e-4] == [
        c for c, m in zip(oracle.greedy_ids, margins, strict=True) if m > 1e-4
    ]


def test_neither_shapes_nor_parts_change_it() -> None:
    source = opened("preset:tiny")
    first = oracle_of(source)
    assert oracle_of(source, geometry(buckets=(2, 8), max_context=64), "rtx-5090") == first
    assert oracle_of(open_source("preset:tiny", dtype=None, seed=1)) != first


@pytest.mark.parametrize(("context", "lengths"), [(2, (1, 1)), (9, (4, 5)), (24, (12, 12)), (40, (16, 16))])
def test_it_fits_a_short_context(context: int, lengths: tuple[int, int]) -> None:
    oracle = oracle_of(opened("preset:tiny"), geometry(max_context=context))
    assert (len(oracle.prompt_ids), len(oracle.greedy_ids)) == lengths


def test_of_several_prompts_the_one_that_tells_most_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened()
    margin = clear_margin(source.model)
    chosen = oracle_of(source)
    monkeypatch.setattr(oracle_module, "PROMPTS", 1)
    alone = []
    for index in range(PROMPTS):
        monkeypatch.setattr(oracle_module, "oracle_prompt", lambda size, length, _, i=index: oracle_prompt(size, length, i))
        alone.append(oracle_of(source))
    assert len({oracle.prompt_ids for oracle in alone}) == PROMPTS
    steady = [oracle for oracle in alone if oracle.clear(margin) and min(oracle.margins) > 0]
    assert 0 < len(steady) < PROMPTS
    assert min(chosen.margins) > 0
    assert len(set(chosen.clear(margin))) == max(len(set(oracle.clear(margin))) for oracle in steady)


def test_a_bfloat16_worker_makes_its_clear_choices() -> None:
    source = opened()
    assert source.model.dtype == "bfloat16"
    oracle, margin = oracle_of(source), clear_margin(source.model)
    worker = reference_worker(BFLOAT16, dtype=None)
    request = Request(oracle.prompt_ids, len(oracle.greedy_ids), feed=oracle.greedy_ids)
    engine = worker.engine()
    engine.submit(request)
    engine.run()
    assert len(set(oracle.clear(margin))) >= 4
    assert oracle.disagreements(request.ids, margin) == ()


def test_widened_weights_are_the_packed_ones_exactly() -> None:
    preset = find_preset("preset:tiny", "--model")
    assert preset is not None
    packed: WeightSource = preset.weights("bfloat16", 3)
    wide = WidenedWeights(packed, preset.model)
    assert wide.label == packed.label
    assert preset.model.dtype == "bfloat16"
    narrow = {t.name: t for t in weight_layout(preset.model)}
    for tensor in weight_layout(msgspec.structs.replace(preset.model, dtype="float32")):
        if tensor.sources:
            stop = min(tensor.elements, 1000)
            bits = packed.read(narrow[tensor.name], stop // 2, stop)
            want = torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()
            assert np.array_equal(wide.read(tensor, stop // 2, stop), want)
