"""Attention alone, as plans made from the stored ones."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest

from ouro_build.artifacts.columns import columns_from_bytes, decode
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.plan import Edge, Pool, ProgramKey
from ouro_build.artifacts.plan_checks import check_graphs
from ouro_build.artifacts.rows import ReferenceRecord
from ouro_build.builder.buffers import kv_layout
from ouro_build.builder.checker import check
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.kernels import registry
from ouro_build.runtime.attention_part import PROGRAM, attention_key, attention_part, queries, with_attention
from ouro_build.runtime.bench_step import DecodeStep, vary_buffer
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.reference import ReferenceExecutor
from tests.reference_worker import ReferenceWorker, reference_worker

MODES = ("dense", "capture", "consume", "mixed")


@cache
def worker() -> ReferenceWorker:
    return reference_worker(
        "preset:tiny", buckets=(1, 4), prefill_buckets=(16,), max_context=64, max_requests=4, sparse=SparseSpec(MODES, 0.1)
    )


def test_the_stored_plans_stay_and_images_are_shared() -> None:
    target = worker().preparation.targets[0]
    made, columns = with_attention(target.index, target.columns)
    assert made.specializations == target.index.specializations
    assert made.buffers[: len(target.index.buffers)] == target.index.buffers
    assert made.plans[: len(target.index.plans)] == target.index.plans
    assert made.graphs[: len(target.index.graphs)] == target.index.graphs
    check_graphs(made, columns_from_bytes(made, columns.to_bytes(), "plans"), "plans")
    parts = [plan for plan in decode(made, columns) if plan.key.program == PROGRAM]
    assert len(parts) == 2 * 5  # buckets; four modes, one of them with a variant
    for plan in parts:
        kernels = [launch.specialization.kernel for launch in plan.launches]
        assert kernels[0] == "resolve"
        assert not {k for k in kernels[1:] if k.startswith(("linear", "rms", "residual", "exit", "silu", "rope"))}
        once = {"consume": [], "mixed": ["route_rows", "split_contexts"]}.get(plan.key.mode, ["split_contexts"])
        assert kernels[1 : 1 + len(once)] == once
        assert (len(kernels) - 1 - len(once)) % worker().steps.model.layers == 0
        if plan.key.mode != "capture":
            # The first layer may read before its wait what was made for all, a retained contribution what was selected.
            own, full, first = Edge.PROGRAMMATIC, Edge.FULL, len(once) + 1
            after: list[tuple[tuple[int, Edge], ...]] = [
                ((at, full if kernels[at] == "attention_select" else own),) for at in range(len(kernels) - 1)
            ]
            # Contexts are cut beside the chain that ends in the first layer.
            after[first - 1] = ((first - 2, own), (first - 1, full)) if "split_contexts" in once else ((0, full),)
            assert [launch.after for launch in plan.launches] == [(), *after]


def test_what_is_read_before_a_wait_was_written_by_then() -> None:
    target = worker().preparation.targets[0]
    made, columns = with_attention(target.index, target.columns)
    pools = dict.fromkeys((Pool.WEIGHTS, Pool.REFERENCES, Pool.STATE, Pool.WORKSPACE, Pool.IO), 1 << 40)
    for plan in (plan for plan in decode(made, columns) if plan.key.program == PROGRAM):
        used = {buffer for launch in plan.launches for _, buffer in launch.buffers()}
        check([plan], list(used), pools, registry.kernel)


@pytest.mark.parametrize("rows", [1, 3])
def test_they_run_over_rows_that_are_described_as_for_a_step(rows: int) -> None:
    made = worker()
    target, geometry, model = made.preparation.targets[0], made.steps.geometry, made.steps.model
    index, columns = with_attention(target.index, target.columns)
    values = load_time_values(kv_layout(model, geometry), made.kv_blocks, target.part.sm_count)
    executor = ReferenceExecutor(index, columns, made.memory, values)
    pools = Pools(index, made.memory, made.kv_blocks, (executor,), {}, lambda: None)
    step = DecodeStep(model, geometry, pools, rows, 50, sparse=True, varied=True)
    bucket = next(b for b in geometry.buckets if b >= rows)
    asked = queries(index, bucket)
    vary_buffer(made.memory, asked)
    written = made.memory.read(asked.pool, asked.offset, asked.bytes)
    step.start()
    before = made.steps.state("row_state")
    for mode in ("dense", "capture", "consume", "consume"):
        executor.run(attention_key(bucket, mode))
    assert np.array_equal(made.steps.state("row_state"), before), "no loop is entered"
    assert np.array_equal(made.memory.read(asked.pool, asked.offset, asked.bytes), written), "nothing writes over the queries"
    records = made.steps.state("reference_records")[:rows]
    assert (records[..., ReferenceRecord.COUNT] == 5).all()
    keys = made.steps.state("reference_keys")[:rows, ..., :5]
    assert len({row.tobytes() for row in keys.reshape(-1, 5)}) > rows, "varied keys: every head chooses others"


def test_what_lies_beside_the_chain_stays_beside_it() -> None:
    target = worker().preparation.targets[0]
    made, columns = with_attention(target.index, target.columns)
    (part,) = (p for p in decode(made, columns) if p.key == attention_key(4, "capture"))
    names = [launch.specialization.kernel for launch in part.launches]
    after = [{names[at]: edge for at, edge in launch.after} for launch in part.launches]
    own, full = Edge.PROGRAMMATIC, Edge.FULL
    assert names[:2] == ["resolve", "split_contexts"]
    layer = ["attention_capture", "attention_merge", "attention_select", "attention_retained", "retained_merge"]
    assert names[2:] == layer * worker().steps.model.layers
    first, second = after[2:7], after[7:12]
    assert after[1] == {"resolve": own}
    assert first == [
        {"resolve": own, "split_contexts": full},
        {"attention_capture": own},
        {"attention_capture": own},
        {"attention_select": full},
        {"attention_retained": own, "attention_merge": full},
    ]
    assert second == [
        {"attention_merge": own},
        {"attention_capture": own},
        {"attention_capture": own, "retained_merge": full},
        {"attention_select": full},
        {"attention_retained": own, "attention_merge": full},
    ]


def test_queries_that_find_no_room_are_refused() -> None:
    target = worker().preparation.targets[0]
    plan = next(p for p in decode(target.index, target.columns) if p.key == ProgramKey("recurrent", 4))
    logits = next(b for b in target.index.buffers if b.name == "logits")
    attention_part(plan, logits)
    with pytest.raises(UsageError, match="queries need 1024 bytes of logits, which has 256"):
        attention_part(plan, msgspec.structs.replace(logits, shape=(4, 16)))
