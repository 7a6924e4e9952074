"""Placements of random plans pass the checker, share space, and keep the declared order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings

from ouro_build.artifacts.packing import weight_buffers
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Buffer, Plan, Pool
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.checker import check
from ouro_build.builder.planner import align, persistent, place, workspace
from ouro_build.builder.programs import Programs
from ouro_build.runtime.memory import ALIGNMENT
from tests.unit.builder.plans import (
    GEOMETRY,
    MODEL,
    kernel,
    launch,
    plan,
    random_plans,
    work,
)

BUFFERS = make_buffers(MODEL, GEOMETRY, {"w": Buffer("w", Pool.WEIGHTS, "float32", (100,), 512)})


@settings(max_examples=200)
@given(random_plans(BUFFERS))
def test_any_plan_is_placed_so_that_the_checker_agrees(plans: tuple[Plan, ...]) -> None:
    placement = place(plans, BUFFERS)
    check(placement.plans, placement.buffers, placement.pools, kernel)


@settings(max_examples=100)
@given(random_plans(BUFFERS))
def test_placing_changes_nothing_but_offsets(plans: tuple[Plan, ...]) -> None:
    placement = place(plans, BUFFERS)
    for before, after in zip(plans, placement.plans, strict=True):
        assert before.key == after.key
        for a, b in zip(before.launches, after.launches, strict=True):
            for x, y in zip(a.arguments, b.arguments, strict=True):
                placed = msgspec.structs.replace(x, offset=y.offset) if isinstance(x, Buffer) and isinstance(y, Buffer) else x
                assert placed == y
            assert (a.grid, a.after, a.specialization) == (b.grid, b.after, b.specialization)


@settings(max_examples=100)
@given(random_plans(BUFFERS))
def test_workspace_is_the_largest_plan_and_no_more(plans: tuple[Plan, ...]) -> None:
    pools = place(plans, BUFFERS).pools
    needs = [max((at + align(b.bytes) for b, at in workspace(plan).items()), default=0) for plan in plans]
    assert pools[Pool.WORKSPACE] == max(needs, default=0)
    total = [sum(align(b.bytes) for b in workspace(plan)) for plan in plans]
    assert pools[Pool.WORKSPACE] <= max(total, default=0)


@pytest.mark.parametrize("bucket", [1, 3])
def test_a_real_program_shares_space_between_layers(bucket: int) -> None:
    def need(layers: int) -> int:
        model = msgspec.structs.replace(MODEL, layers=layers)
        buffers = make_buffers(model, GEOMETRY, weight_buffers(model))
        recurrent = Programs(model, GEOMETRY, find_part("sm_90"), buffers).recurrent(bucket)
        return max(at + align(b.bytes) for b, at in workspace(recurrent).items())

    assert need(8) < 1.25 * need(2)


def test_a_chain_of_equal_buffers_needs_room_for_two() -> None:
    assert sorted(set(workspace(chain_of([64] * 10)).values())) == [0, 256]


def test_the_hosts_inputs_lead_the_io_pool() -> None:
    io = [b for b in place((), BUFFERS).buffers if b.pool is Pool.IO]
    assert [b.name for b in io][:3] == ["coda_batch", "batch", "inputs"]
    assert io[0].offset == 0
    for a, b in pairwise(io):
        assert b.offset == align(a.offset + a.bytes)


def test_every_declared_buffer_is_placed_at_a_multiple_of_the_alignment() -> None:
    names = {b.name: b for b in place((), BUFFERS).buffers}
    for buffer in persistent(BUFFERS):
        assert names[buffer.name].offset % ALIGNMENT == 0
    assert names["w"].offset == 512
    assert names["kv"].offset == 0


def test_the_kv_pool_has_no_size_of_its_own() -> None:
    pools = place((), BUFFERS).pools
    assert Pool.KV not in pools
    assert pools[Pool.WEIGHTS] == 1024


def chain_of(sizes: Sequence[int]) -> Plan:
    """A plan whose launch i reads buffer i - 1 and writes buffer i."""
    made = [work(f"b{i}", size) for i, size in enumerate(sizes)]
    return plan(launch(made[:1]), *(launch([b], [a]) for a, b in pairwise(made)))
