"""What a step must read and what its time amounts to; and the step itself, against the same in torch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.manifest import Manifest, TensorRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import pool_bytes, weight_layout
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.rows import Row
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime import timing
from ouro_build.runtime.bench import make_line, step_bytes, step_launches
from ouro_build.runtime.bench_step import DecodeStep, check_shape, read_seconds
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.torch_baseline import TorchDecoder, random_weights, values_to_read
from tests.artifact_maker import base_manifest, weights_record
from tests.reference_worker import GOLDEN, ReferenceWorker, reference_worker
from tests.unit.artifacts.blocks import logical


def manifest_of(model: ModelConfig) -> Manifest:
    """A manifest as far as sizes go."""
    tensors = tuple(
        TensorRecord(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, bytes=t.bytes, sha256="", sources=())
        for t in weight_layout(model)
    )
    weights = msgspec.structs.replace(weights_record(), tensors=tensors, bytes=pool_bytes(model))
    return msgspec.structs.replace(base_manifest(("h200",), weights), model=model)


@pytest.mark.parametrize(
    ("rows", "context", "gigabytes"), [(1, 1024, 10.87), (8, 1024, 16.5), (32, 1024, 35.8), (2, 14600, 33.0)]
)
def test_bytes_of_a_step_of_the_large_model(rows: int, context: int, gigabytes: float) -> None:
    manifest = manifest_of(PRESETS["ouro-1.4b"].model)
    assert step_bytes(manifest, rows, context) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step_by_hand(tied: bool) -> None:
    model = msgspec.structs.replace(PRESETS["tiny"].model, tied_embeddings=tied, dtype="bfloat16")
    h, f, q, kv = model.hidden_size, model.intermediate_size, model.query_size, model.kv_size
    padded = -(-f // 32) * 32  # columns are stored in blocks of 32; here all else is whole blocks
    layer = h * (q + 2 * kv) + q * h + 2 * h * f + h * padded + 4 * h
    elements = model.loops * (model.layers * layer + 2 * h + 1) + model.vocab_size * h
    elements += 3 * 40 * 2 * model.loops * model.layers * kv
    assert step_bytes(manifest_of(model), 3, 40) == 2 * elements


def test_arithmetic_of_a_line() -> None:
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 4), (16,), max_context=64)
    preparation = prepare(spec)
    index, model = preparation.targets[0].index, preparation.source.model
    manifest = msgspec.structs.replace(manifest_of(model), geometry=preparation.geometry)
    plans = {(e.key.program, e.key.bucket): e.launches for e in index.plans}
    launches, layer = step_launches(manifest, index, 4)
    assert launches == sum(plans[p, 4] for p in ("prelude", "coda", "sample", "advance")) + 4 * plans["recurrent", 4]
    assert layer == plans["recurrent", 4] / model.layers
    line = make_line(manifest, index, (3, 64), 0.5, 0.25)
    assert (line.rows, line.bucket, line.context, line.ms, line.launches) == (3, 4, 64, 0.5, launches)
    assert line.bytes == step_bytes(manifest, 3, 64)
    assert line.tb_s == pytest.approx(line.bytes / 0.5e-3 / 1e12)
    assert line.read_share == pytest.approx(line.tb_s / 0.25)
    assert line.tokens_s == pytest.approx(6000)
    assert make_line(manifest, index, (3, 64), 0.5, None).read_share is None


def test_shapes_without_room_are_refused() -> None:
    geometry = worker().steps.geometry
    check_shape(geometry, 4, 64, 16)
    for rows, context, blocks, where, hint in (
        (5, 64, 99, "--rows", "at most 4, or build with larger --buckets"), (0, 1, 9, "--rows", "Give at least 1."),
        (1, 65, 99, "--context", "at most 64, or build with a larger --max-context"), (1, 0, 9, "--context", "at least 1."),
        (4, 49, 15, "--rows, --context", "fewer rows"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            check_shape(geometry, rows, context, blocks)
        assert caught.value.where == where
        assert hint in caught.value.hint
        assert ("uild" in caught.value.hint) == (rows > 4 or context > 64), "more would not help"
        with pytest.raises(UsageError) as again:
            check_shape(geometry, rows, context, blocks, ("--shapes", "--shapes"))
        assert (again.value.where, again.value.what) == ("--shapes", caught.value.what)


def test_a_slow_run_is_measured_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    seen: list[str] = []
    took = timing.measure(lambda: seen.append("run"), lambda: seen.append("wait"))
    assert took == [1 / 5] * 3
    assert seen == ["wait", "run", "wait"] * 2 + ["wait", *["run"] * 5, "wait"] * 3
    assert timing.median_ms([0.001, 0.5, 0.002]) == 2


@pytest.mark.parametrize(("hopeless", "batches"), [(0.0019, 3), (0.0021, 20), (float("inf"), 20)])
def test_a_run_that_is_too_slow_for_its_purpose_is_measured_fewer_times(
    monkeypatch: pytest.MonkeyPatch, hopeless: float, batches: int
) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) / 100)
    assert timing.measure(lambda: None, lambda: None, hopeless) == pytest.approx([0.01 / 5] * batches)


def worker() -> ReferenceWorker:
    return reference_worker(
        str(GOLDEN / "gqa-fp32"), buckets=(1, 4), prefill_buckets=(16,), max_context=64, max_requests=4, kv_blocks=16
    )


def pools_of(made: ReferenceWorker) -> Pools:
    executors = made.steps._dispatcher._executors
    return Pools(made.preparation.targets[0].index, made.memory, made.kv_blocks, executors, {}, lambda: None)


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 33), (3, 64), (4, 17)])
def test_the_step_is_right_and_that_of_torch_is_the_same(rows: int, context: int) -> None:
    made = worker()
    model, memory = made.steps.model, made.memory
    step = DecodeStep(model, made.steps.geometry, pools_of(made), rows, context)
    tables = made.steps.state("block_tables").astype(np.int32)
    assert ((tables[:rows] >= 0).sum(1) == -(-context // 16)).all()
    assert step.compare().right
    step.run()
    state = made.steps.state("row_state")
    assert (state[:rows, Row.POSITION] == context).all(), "advance moves on; the next prelude goes back"
    sampled = made.steps.collect(rows, logits=True)
    assert sampled.logits is not None
    step.run()
    again = made.steps.collect(rows, logits=True).logits
    assert again is not None
    assert np.array_equal(again, sampled.logits)

    raw = memory.arena(Pool.WEIGHTS)
    weights = {
        t.name: torch.from_numpy(logical(t, raw[t.offset : t.offset + t.bytes].view(np.float32))) for t in weight_layout(model)
    }
    cache = torch.full((2, model.planes, rows, model.kv_heads, context, model.head_dim * 4), 0x3C, dtype=torch.uint8)
    given = np.random.default_rng(1).integers(model.vocab_size, size=rows)
    decoder = TorchDecoder(model, weights, cache.view(torch.float32), torch.from_numpy(given))
    with torch.inference_mode():
        logits = decoder.step()
    assert torch.allclose(logits, torch.from_numpy(sampled.logits), atol=1e-4)
    assert decoder.tokens.tolist() == sampled.tokens.tolist()


@pytest.mark.parametrize("retention", [0.1, 1.0])
def test_a_sparse_step_is_what_the_modes_give_one_by_one(retention: float) -> None:
    made = reference_worker(
        str(GOLDEN / "gqa-fp32"), buckets=(1, 4), prefill_buckets=(16,), max_context=64, max_requests=4,
        sparse=SparseSpec(("dense", "capture", "consume"), retention), retained_mass=True,
    )  # fmt: skip
    pools = pools_of(made)
    arguments = (made.steps.model, made.steps.geometry, pools, 3, 40)
    dense = DecodeStep(*arguments, varied=True)
    assert dense.compare().right
    whole = made.steps.collect(3, logits=True).logits
    step = DecodeStep(*arguments, sparse=True, varied=True, retained_mass=True)
    assert step.compare().right
    sparse = made.steps.collect(3, logits=True).logits
    assert whole is not None
    assert sparse is not None
    assert np.array_equal(whole, sparse) == (retention == 1.0)
    step.run()
    mass = step.mean_mass()
    assert (mass is None) if retention == 1.0 else (mass is not None and 0.1 < mass < 1)


def test_values_that_are_not_finite_are_not_right() -> None:
    made = worker()
    step = DecodeStep(made.steps.model, made.steps.geometry, pools_of(made), 2, 20)
    made.memory.fill(Pool.KV, 0xFF)
    assert not step.compare().right


def test_all_weights_are_read() -> None:
    made = worker()
    pools = pools_of(made)
    made.memory.fill(Pool.IO, 0xFF)
    took = read_seconds(pools)
    assert took is not None
    assert min(took) > 0
    buffers = {b.name: b for b in pools.index.buffers}
    assert buffers["weights"].bytes == made.memory.size(Pool.WEIGHTS) == pool_bytes(made.steps.model)
    sums = made.memory.read(Pool.IO, buffers["read_sums"].offset, buffers["read_sums"].bytes).view(np.int32)
    words = made.memory.arena(Pool.WEIGHTS).view(np.int32)
    programs = min(1024, 4 * 132, -(-len(words) // 8192))
    assert (int(sums[:programs].sum(dtype=np.int64)) - int(words.sum(dtype=np.int64))) % 2**32 == 0
    assert (sums[programs:] == -1).all()


def test_what_torch_reads_is_as_many_bytes_as_the_weights() -> None:
    size = pool_bytes(PRESETS["tiny"].model)
    values = values_to_read(size, "cpu")
    assert (values.nbytes, values.dtype, values.is_contiguous()) == (size, torch.float32, True)
    assert values.isfinite().all()
    assert values.std() > 0


def test_random_weights_have_the_packings_shapes() -> None:
    model = PRESETS["tiny"].model
    made = random_weights(model, "cpu")
    assert {n: (tuple(t.shape), str(t.dtype)) for n, t in made.items()} == {
        t.name: (t.matrix or t.shape, f"torch.{t.dtype}") for t in weight_layout(model)
    }
    assert all(bool(t.isfinite().all()) for t in made.values())
