"""The checker finds each kind of violation, and any harmful change to a sound placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.packing import weight_buffers
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Buffer, Edge, Launch, Plan, Pool, ProgramKey
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.checker import check
from ouro_build.builder.planner import place
from ouro_build.builder.programs import Programs
from ouro_build.kernels import registry
from tests.unit.builder.plans import (
    GEOMETRY,
    MODEL,
    kernel,
    launch,
    plan,
    random_plans,
    work,
)

WEIGHT = Buffer("w", Pool.WEIGHTS, "float32", (100,), 0)
BUFFERS = make_buffers(MODEL, GEOMETRY, {"w": WEIGHT})
POOLS = {Pool.WEIGHTS: 1024, Pool.STATE: 4096, Pool.WORKSPACE: 4096, Pool.IO: 1024}


def at(buffer: Buffer, offset: int) -> Buffer:
    return msgspec.structs.replace(buffer, offset=offset)


A, B, C = at(work("a", 64), 0), at(work("b", 64), 256), at(work("c", 64), 512)


def checked(*launches: Launch, buffers: Sequence[Buffer] | None = None, pools: Mapping[Pool, int] = POOLS) -> None:
    made = plan(*launches)
    used = {b for x in made.launches for _, b in x.buffers()}
    check([made], list(buffers if buffers is not None else used), pools, kernel)


def refused(text: str, *launches: Launch, buffers: Sequence[Buffer] | None = None, pools: Mapping[Pool, int] = POOLS) -> None:
    with pytest.raises(BuildError, match=text):
        checked(*launches, buffers=buffers, pools=pools)


def test_a_sound_plan_passes() -> None:
    checked(launch([A], [WEIGHT]), launch([B], [A]), launch([at(C, 0)], [B]))


def test_a_kernel_that_may_start_early_waits_inside() -> None:
    unwaiting = msgspec.structs.replace(launch([B], [A]), after=((0, Edge.PROGRAMMATIC),))
    refused(r"launch 1 \(1\) may start before launch 0 has ended, and does not wait inside", launch([A]), unwaiting)
    checked(launch([A]), programmatic(unwaiting, 0))


def programmatic(x: Launch, *after: int) -> Launch:
    """The launch, waiting inside for `after`."""
    options = msgspec.structs.replace(x.specialization.options, programmatic=True)
    waiting = msgspec.structs.replace(x.specialization, options=options)
    return msgspec.structs.replace(x, specialization=waiting, after=tuple((i, Edge.PROGRAMMATIC) for i in after))


def early(*launches: Launch, settled: tuple[str, ...] = ()) -> None:
    """Check a plan whose kernels that write one buffer may read `in0` early."""
    made = plan(*launches)
    used = {b for x in made.launches for _, b in x.buffers()}
    check([made], list(used), POOLS, lambda name: replace(kernel(name), early=("in0",) * (name == "1"), settled=settled))


def test_weights_may_be_read_before_the_wait() -> None:
    made = plan(launch([A]), programmatic(launch([B], [A, WEIGHT]), 0))
    check([made], [A, B, WEIGHT], POOLS, lambda name: replace(kernel(name), weights=("in1",)))
    with pytest.raises(BuildError, match="may read a before it waits, and in0 is no weight"):
        check([made], [A, B, WEIGHT], POOLS, lambda name: replace(kernel(name), weights=("in0",)))


def test_what_wrote_something_that_is_read_before_the_wait_has_ended_by_then() -> None:
    early(launch([A, B]), launch([C], [A]))
    ended = launch([A, B]), launch([C, at(work("d", 64), 768)], [B]), programmatic(launch([at(work("e", 64), 1024)], [A]), 1)
    early(*ended)
    with pytest.raises(BuildError, match=r"launch 1 \(1\) may read a before it waits, and programs before this one may still"):
        early(launch([A, B]), programmatic(launch([C], [A]), 0))
    unended = ended[0], programmatic(ended[1], 0), ended[2]
    with pytest.raises(BuildError, match="may read a before it waits, and programs before this one may still write it"):
        early(*unended)
    with pytest.raises(BuildError, match="may read b before it waits, and launch 1 may still write it"):
        early(launch([A, C]), launch([B, at(work("d", 64), 768)], [A]), programmatic(launch([at(work("e", 64), 1024)], [B]), 1))


def test_what_programs_before_wrote_is_read_before_the_wait_only_after_a_launch_that_all_had_to_end_for() -> None:
    state = Buffer("state", Pool.STATE, "float32", (64,), 0)
    early(launch([A, B]), launch([C, at(work("d", 64), 768)], [A]), programmatic(launch([at(work("e", 64), 1024)], [state]), 1))
    with pytest.raises(BuildError, match="may read state before it waits, and programs before this one may still write it"):
        early(launch([A], [state]))


def test_of_what_is_settled_a_part_may_be_read_that_no_launch_writes() -> None:
    made = launch([A, C]), launch([B, at(work("d", 64), 768)], [A]), programmatic(launch([at(work("e", 64), 1024)], [B]), 1)
    early(*made, settled=("in0",))
    with pytest.raises(BuildError, match="programs before this one may still write it"):
        early(made[0], programmatic(made[1], 0), made[2], settled=("in0",))


def test_an_unplaced_buffer() -> None:
    refused("is at -1", launch([at(A, -1)]))


def test_a_misaligned_buffer() -> None:
    refused("no multiple of 256", launch([at(A, 128)]))


def test_a_buffer_past_the_end_of_its_pool() -> None:
    refused("outside workspace of 4096 bytes", launch([at(A, 4096 - 0)]))


def test_a_pool_that_was_never_sized() -> None:
    refused("outside workspace of 0 bytes", launch([A]), pools={})


def test_live_buffers_that_overlap() -> None:
    refused("a and b overlap and are live", launch([A]), launch([at(B, 0)], [A]))


def test_a_buffer_overwritten_between_its_write_and_its_read() -> None:
    other = at(work("b", 1), 0)
    refused("overlap and are live", launch([A]), launch([other]), launch([C], [A]))


def test_branches_in_no_order_may_not_share() -> None:
    refused("overlap and are live", launch([A], after=[]), launch([at(B, 0)], after=[]))


def test_a_read_before_any_write() -> None:
    refused("reads b before anything wrote it", launch([A], [B]), launch([B]))


def test_an_update_is_a_read_and_a_write() -> None:
    """The kernel named 1 updates what it writes, the kernel named 2 writes it alone."""

    def check_updates(*launches: Launch) -> None:
        check([plan(*launches)], [A, B], POOLS, lambda name: replace(kernel(name), updates=("out0",) if name == "1" else ()))

    check_updates(launch([A, B]), launch([A]), launch([A]))
    with pytest.raises(BuildError, match="launch 0 reads a before anything wrote it"):
        check_updates(launch([A]), launch([A]))
    with pytest.raises(BuildError, match="use a in no order"):
        check_updates(launch([A, B]), launch([A], after=[0]), launch([A], after=[0]))


def test_a_program_that_reads_a_residual_that_nothing_wrote() -> None:
    """The first kernel of a loop starts the residual stream, and every other goes on with it."""
    buffers = make_buffers(MODEL, GEOMETRY, weight_buffers(MODEL))
    placement = place(Programs(MODEL, GEOMETRY, find_part("h200"), buffers).record(), buffers)
    (recurrent,) = [p for p in placement.plans if p.key == ProgramKey("recurrent", 3)]

    def check_loop(plan: Plan) -> None:
        check([plan], placement.buffers, placement.pools, registry.kernel)

    check_loop(recurrent)
    at = next(i for i, x in enumerate(recurrent.launches) if x.specialization.kernel == "rms_norm")
    started = recurrent.launches[at]
    residual, out = started.named()["residual"], started.named()["out"]
    elsewhere = msgspec.structs.replace(started, arguments=tuple(out if a == residual else a for a in started.arguments))
    launches = [elsewhere if i == at else x for i, x in enumerate(recurrent.launches)]
    with pytest.raises(BuildError, match="reads recurrent/3/dense/residual before anything wrote it"):
        check_loop(Plan(recurrent.key, tuple(launches)))


def test_a_read_in_no_order_with_its_write() -> None:
    refused("in no order", launch([A], after=[]), launch([B], [A], after=[]))


def test_two_writers_in_no_order() -> None:
    state = at(BUFFERS.hidden, 0)
    refused("in no order", launch([state], after=[]), launch([state], after=[]))


def test_a_dependency_on_a_later_launch() -> None:
    refused("does not come earlier", launch([A], after=[1]), launch([B]))


def test_a_dependency_on_itself() -> None:
    refused("does not come earlier", launch([A], after=[0]))


def test_a_write_to_the_weights() -> None:
    refused("writes w in weights", launch([WEIGHT]))


def test_an_undeclared_buffer() -> None:
    refused("used but not declared", launch([A]), buffers=[])


def test_state_buffers_that_overlap() -> None:
    both = [at(BUFFERS.row_state, 0), at(BUFFERS.hidden, 0)]
    refused("overlap in state", launch([A]), buffers=[A, *both])


def test_a_kv_buffer_shares_its_pool_with_nothing() -> None:
    kv = at(BUFFERS.kv, 0)
    refused("overlap in kv", launch([A]), buffers=[A, kv, Buffer("x", Pool.KV, "float32", (4,), 0)])
    refused("pool of such a size", launch([A]), buffers=[A, at(BUFFERS.kv, 256)])


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)])
def test_a_grid_over_the_limits(grid: tuple[int, int, int]) -> None:
    refused("has grid", launch([A], grid=grid))


@settings(max_examples=200)
@given(random_plans(BUFFERS), st.data())
def test_moving_a_buffer_onto_a_live_one_is_found(plans: tuple[Plan, ...], data: st.DataObject) -> None:
    placement = place(plans, BUFFERS)
    chosen = data.draw(st.sampled_from(placement.plans))
    victims = sorted({b for x in chosen.launches for _, b in x.buffers() if b.pool is Pool.WORKSPACE}, key=lambda b: b.name)
    victim = data.draw(st.sampled_from(victims))
    same = [x for x in chosen.launches if victim in x.arguments]
    others = [b for x in same for _, b in x.buffers() if b.pool is Pool.WORKSPACE and b != victim]
    assume(others)
    moved = at(victim, data.draw(st.sampled_from(others)).offset)
    broken = [_swapped(p, victim, moved) for p in placement.plans]
    buffers = [moved if b == victim else b for b in placement.buffers]
    with pytest.raises(BuildError, match="live at the same time"):
        check(broken, buffers, {**placement.pools, Pool.WORKSPACE: 1 << 30}, kernel)


@settings(max_examples=100)
@given(random_plans(BUFFERS), st.data())
def test_a_pool_too_small_by_one_alignment_is_found(plans: tuple[Plan, ...], data: st.DataObject) -> None:
    placement = place(plans, BUFFERS)
    pool = data.draw(st.sampled_from([p for p, size in placement.pools.items() if size]))
    small = {**placement.pools, pool: placement.pools[pool] - 256}
    with pytest.raises(BuildError, match="outside"):
        check(placement.plans, placement.buffers, small, kernel)


@settings(max_examples=100)
@given(random_plans(BUFFERS), st.data())
def test_dropping_the_dependencies_of_a_reader_is_found(plans: tuple[Plan, ...], data: st.DataObject) -> None:
    placement = place(plans, BUFFERS)
    chosen = data.draw(st.sampled_from(placement.plans))
    readers = [
        i
        for i, x in enumerate(chosen.launches)
        if any(n.startswith("in") and b.pool is not Pool.WEIGHTS for n, b in x.buffers())
    ]
    assume(readers)
    reader = data.draw(st.sampled_from(readers))
    launches = [msgspec.structs.replace(x, after=()) if i == reader else x for i, x in enumerate(chosen.launches)]
    with pytest.raises(BuildError):
        check([Plan(chosen.key, tuple(launches))], placement.buffers, placement.pools, kernel)


def _swapped(p: Plan, old: Buffer, new: Buffer) -> Plan:
    launches = [msgspec.structs.replace(x, arguments=tuple(new if a == old else a for a in x.arguments)) for x in p.launches]
    return Plan(p.key, tuple(launches))


def test_only_a_buffer_that_is_all_of_the_weights_may_overlap_them() -> None:
    whole = Buffer("weights", Pool.WEIGHTS, "int32", (256,), 0)
    checked(launch([A], [whole]), buffers=[A, WEIGHT, whole])
    part = msgspec.structs.replace(whole, shape=(255,))
    refused("w and weights overlap in weights", launch([A], [part]), buffers=[A, WEIGHT, part])
    state = Buffer("state", Pool.STATE, "int32", (1024,), 0)
    other = msgspec.structs.replace(state, name="other", shape=(4,))
    refused("other and state overlap in state", launch([A]), buffers=[A, state, other])
