"""The memory plan: what it holds, and what it says when it does not."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.errors import BudgetError
from ouro_build.artifacts.fit import CONTEXT_BYTES
from ouro_build.artifacts.manifest import MemoryPlan
from ouro_build.artifacts.parts import PARTS, Part, find_part
from ouro_build.artifacts.plan import Pool
from ouro_build.builder.budget import MIB, NODE_BYTES, default_budget, full_requests, plan_memory, reserve, size
from tests.unit.builder.plans import GEOMETRY, MODEL, launch, plan, work

PART = find_part("l4")
POOLS = {Pool.WEIGHTS: 10 * MIB, Pool.STATE: MIB, Pool.WORKSPACE: 2 * MIB, Pool.IO: MIB}
BLOCK = GEOMETRY.block_bytes(MODEL)
REQUEST = GEOMETRY.table_width * BLOCK
FIXED = reserve(()) + sum(POOLS.values())


def planned(memory: int | None, pools: Mapping[Pool, int] = POOLS) -> MemoryPlan:
    return plan_memory(PART, MODEL, GEOMETRY, (), pools, memory)


def test_kv_is_capped_at_what_every_request_can_use() -> None:
    made = planned(None)
    assert made.kv_blocks == GEOMETRY.max_requests * GEOMETRY.table_width
    assert full_requests(made, GEOMETRY) == GEOMETRY.max_requests
    assert made.pool_bytes(Pool.WEIGHTS) == 10 * MIB


def test_kv_takes_what_is_left() -> None:
    made = planned(FIXED + REQUEST + BLOCK)
    assert made.kv_blocks == GEOMETRY.table_width + 1
    assert full_requests(made, GEOMETRY) == 1


def test_one_request_must_fit() -> None:
    assert planned(FIXED + REQUEST).kv_blocks == GEOMETRY.table_width
    with pytest.raises(BudgetError) as caught:
        planned(FIXED + REQUEST - MIB)
    text = str(caught.value)
    assert "--memory for --gpu l4" in text
    assert "too small by 1.00 MiB" in text
    assert "10.00 MiB weights" in text
    assert "KV of one request of 64 tokens" in text
    assert caught.value.exit_code == 1


def test_more_than_the_part_has() -> None:
    with pytest.raises(BudgetError, match="more than l4 has"):
        planned(PART.memory + 1)


@given(st.integers(FIXED, FIXED + 20 * REQUEST), st.integers(0, 4 * MIB))
def test_a_plan_never_exceeds_its_budget(memory: int, state: int) -> None:
    try:
        made = planned(memory, {**POOLS, Pool.STATE: state})
    except BudgetError:
        assert memory < FIXED - MIB + state + REQUEST
        return
    assert made.total <= made.budget == memory
    assert made.kv_blocks >= GEOMETRY.table_width


def test_the_reserve_counts_nodes() -> None:
    chain = [launch([work(f"b{i}", 4)]) for i in range(640)]
    assert reserve([plan(*chain)]) >= CONTEXT_BYTES + 640 * NODE_BYTES
    assert reserve(()) == CONTEXT_BYTES


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_the_default_leaves_room_for_ecc(part: Part) -> None:
    assert default_budget(part) <= part.memory * 15 // 16


def test_pools_of_no_bytes_are_not_listed() -> None:
    made = planned(None, {**POOLS, Pool.REFERENCES: 0})
    assert Pool.REFERENCES not in [r.pool for r in made.pools]
    assert msgspec.json.decode(msgspec.json.encode(made), type=type(made)) == made


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.00 KiB"), (4096, "4.00 KiB"), (MIB - 1, "1024.00 KiB"), (MIB, "1.00 MiB"), (3 << 29, "1.50 GiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text
