"""The states that plans are tried in: the same every time, and no program reads what they poison or touches other rows."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest

from ouro_build.artifacts.geometry import SPARSE_MODES
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.rows import Row
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.runtime.reference import ReferenceExecutor
from ouro_build.runtime.scenes import Scene, blocks_needed, live_patterns
from tests.reference_worker import GOLDEN, ReferenceWorker, reference_worker

POOLS = (Pool.KV, Pool.REFERENCES, Pool.STATE, Pool.IO)


@cache
def worker() -> ReferenceWorker:
    small = reference_worker(
        str(GOLDEN / "gqa-fp32"), buckets=(1, 3, 8), prefill_buckets=(16,), max_context=64, max_requests=4, kv_blocks=64,
        sparse=SparseSpec(SPARSE_MODES, 0.3, reference_slots=6),
    )  # fmt: skip
    assert blocks_needed(small.steps.geometry) <= small.kv_blocks
    return small


def executor() -> ReferenceExecutor:
    found = worker().steps._dispatcher._executors[0]
    assert isinstance(found, ReferenceExecutor)
    return found


def keys() -> list[ProgramKey]:
    return [entry.key for entry in worker().preparation.targets[0].index.plans]


def snapshot() -> dict[Pool, np.ndarray]:
    memory = worker().memory
    return {pool: memory.read(pool, 0, memory.size(pool)) for pool in POOLS}


def run(key: ProgramKey, live: tuple[bool, ...]) -> tuple[Scene, dict[Pool, np.ndarray], dict[Pool, np.ndarray]]:
    index = worker().preparation.targets[0].index
    scene = Scene(worker().steps.model, worker().steps.geometry, key, live, worker().kv_blocks)
    scene.write(worker().memory, {b.name: b for b in index.buffers})
    before = snapshot()
    executor().run(key)
    return scene, before, snapshot()


@pytest.mark.parametrize("key", keys(), ids=str)
def test_runs_are_repeatable_and_leave_other_slots_alone(key: ProgramKey) -> None:
    hidden = next(b for b in worker().preparation.targets[0].index.buffers if b.name == "hidden")
    for live in live_patterns(key.bucket):
        scene, before, after = run(key, live)
        _, before_again, after_again = run(key, live)
        assert all(np.array_equal(before[p], before_again[p]) and np.array_equal(after[p], after_again[p]) for p in POOLS)
        changed = [p for p in POOLS if not np.array_equal(before[p], after[p])]
        assert changed or key.program == "kv_copy", "the program did nothing"
        rows = after[Pool.STATE][hidden.offset : hidden.offset + hidden.bytes].view(np.float32).reshape(hidden.sizes)
        alive = set(scene.slots.tolist())
        assert np.isfinite(rows[sorted(alive)]).all(), "a live row came to hold poison"
        assert np.isnan(rows[[s for s in range(len(rows)) if s not in alive]]).all()


@pytest.mark.parametrize("program", ["recurrent", "prefill"])
@pytest.mark.parametrize("swapped", [False, True])
def test_keys_and_values_are_where_requests_have_positions_and_poison_is_elsewhere(program: str, swapped: bool) -> None:
    w = worker()
    model, geometry = w.steps.model, w.steps.geometry
    buffers = {b.name: b for b in w.preparation.targets[0].index.buffers}
    planes, blocks, *block = buffers["kv"].shape
    if swapped:
        buffers["kv"] = msgspec.structs.replace(buffers["kv"], shape=(blocks, planes, *block))
    scene = Scene(model, geometry, ProgramKey(program, 16), (True, False) * 8, w.kv_blocks)
    scene.write(w.memory, buffers)
    outer = (w.kv_blocks, model.planes) if swapped else (model.planes, w.kv_blocks)
    shape = (*outer, 2, model.kv_heads, geometry.block_size, model.head_dim)
    kv = snapshot()[Pool.KV].view(np.float32).reshape(shape)
    kv = kv.swapaxes(0, 1) if swapped else kv
    tables = w.steps.state("block_tables").astype(np.int32)
    state = w.steps.state("row_state").astype(np.int32)
    state = state[state[:, Row.REQUEST] >= 0]
    lengths = {int(r): int(state[state[:, Row.REQUEST] == r, Row.POSITION].max()) + 1 for r in np.unique(state[:, Row.REQUEST])}
    finite = np.zeros((w.kv_blocks, geometry.block_size), bool)
    for request, length in lengths.items():
        for position in range(length):
            finite[tables[request, position // geometry.block_size], position % geometry.block_size] = True
    assert 0 < finite.sum() == sum(lengths.values())
    assert np.array_equal(np.isfinite(kv), np.broadcast_to(finite[:, None, None, :, None], kv.shape))
    heads = kv[:, finite.any(1)][..., 0, :].reshape(-1, model.head_dim)
    assert len(np.unique(heads, axis=0)) == len(heads), "two heads hold the same"


def test_blocks_for_fewer_rows_are_enough_for_them() -> None:
    model, geometry = worker().steps.model, worker().steps.geometry
    for program in ("recurrent", "coda", "kv_copy"):
        for bucket in geometry.buckets:
            for live in live_patterns(bucket):
                for seed in range(20):
                    key = ProgramKey(program, bucket)
                    Scene(model, geometry, key, live, blocks_needed(geometry, bucket), seed)
                    Scene(model, geometry, key, live, blocks_needed(geometry, bucket, 50), seed, 50)
    assert blocks_needed(geometry, 1) < blocks_needed(geometry)


def test_small_buckets_are_tried_in_every_arrangement() -> None:
    assert len(live_patterns(3)) == 7
    assert all(len(p) == 8 and any(p) for p in live_patterns(8))
