from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.columns import Columns, GraphEntry, GraphStep, PlanIndex, columns_from_bytes, decode, encode
from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.plan import (
    LOAD_TIME_VALUES,
    Argument,
    Buffer,
    Edge,
    Launch,
    Options,
    Plan,
    Pool,
    ProgramKey,
    Specialization,
)
from ouro_build.artifacts.plan_checks import MAX_TIMES, check_arguments, check_graphs
from ouro_build.artifacts.writer import encode_plan_index
from tests.artifact_maker import PLANS, encoded_plans

BUFFERS = tuple(Buffer(f"b{i}", Pool(i % 6), "float32", (4,), 256 * i) for i in range(7))
VALUES: dict[str, st.SearchStrategy[Argument]] = {
    "*fp32": st.sampled_from(BUFFERS),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "u32": st.integers(0, 2**32 - 1),
    "i64": st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from(LOAD_TIME_VALUES)),
    "u64": st.integers(0, 2**64 - 1),
    "fp32": st.floats(width=32, allow_nan=False),
}
DIM = st.one_of(st.integers(1, 2**32 - 1), st.sampled_from(LOAD_TIME_VALUES))


def checked(index: PlanIndex, raw: bytes) -> Columns:
    columns = columns_from_bytes(index, raw, "p.bin")
    check_arguments(index, columns, "p.bin")
    check_graphs(index, columns, "p.json")
    return columns


@st.composite
def launches(draw: st.DrawFn, before: int) -> Launch:
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), max_size=5))
    specialization = Specialization(
        kernel=draw(st.sampled_from("abc")),
        contract=1,
        types=tuple((f"p{i}", kind) for i, kind in enumerate(kinds)),
        constants=(("N", draw(st.sampled_from([1, True, None, "x"]))),),
        divisible=(),
        options=Options(num_warps=4, num_stages=1, programmatic=draw(st.booleans())),
    )
    edges = list(Edge) if specialization.options.programmatic else [Edge.FULL]
    after = draw(st.lists(st.sampled_from(range(before)), unique=True, max_size=3)) if before else []
    return Launch(
        specialization=specialization,
        grid=(draw(DIM), draw(DIM), draw(DIM)),
        arguments=tuple(draw(VALUES[kind]) for kind in kinds),
        after=tuple((at, draw(st.sampled_from(edges))) for at in after),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, ...]:
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    return tuple(
        Plan(ProgramKey("p", i + 1), tuple(draw(launches(before)) for before in range(size))) for i, size in enumerate(sizes)
    )


@given(plans())
@settings(max_examples=60)
def test_round_trip(recorded: tuple[Plan, ...]) -> None:
    index, columns = encode(recorded, BUFFERS, ())
    again = checked(index, columns.to_bytes())
    assert decode(index, again) == recorded
    assert index.graphs == tuple(GraphEntry(plan.key, (GraphStep(i, 1, Edge.FULL),)) for i, plan in enumerate(recorded))
    assert again.to_bytes() == columns.to_bytes()
    assert encode_plan_index(msgspec.json.decode(encode_plan_index(index), type=type(index))) == encode_plan_index(index)


@given(st.data())
@settings(max_examples=150)
def test_damage_is_refused_or_in_range(data: st.DataObject) -> None:
    """Whatever the bytes say, what is accepted decodes to launches of the known buffers."""
    index, columns = encoded_plans()
    raw = bytearray(columns.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ArtifactError):
        for plan in decode(index, checked(index, bytes(raw))):
            for at, launch in enumerate(plan.launches):
                assert all(buffer in index.buffers for _, buffer in launch.buffers())
                assert all(before < at for before, _ in launch.after)


def altered(column: str, place: int, value: int, field: str = "", also: Sequence[tuple[str, int]] = ()) -> Columns:
    """The columns with one value changed; `also`: values of other columns, at the same place."""
    columns: Columns = encoded_plans()[1]
    for name, new in ((column, value), *also):
        array: Any = np.array(getattr(columns, name))
        (array[field] if field else array)[place] = new
        columns = msgspec.structs.replace(columns, **{name: array})
    return columns


DAMAGE: dict[str, tuple[Columns, str]] = {
    "tag": (altered("launches", 0, 1, "tag"), "node tag 1 is not known to format 1.0"),
    "tensor map": (altered("kinds", 0, 2), "tensor map arguments are not known"),
    "kind": (altered("kinds", 0, 99), "argument kind is out of range at index 0"),
    "buffer": (altered("buffers", 0, 99), "buffer of an argument"),
    "address": (altered("slots", 0, 99), "address of an argument is out of range at index 0"),
    "specialization": (altered("launches", 1, 2, "specialization"), "specialization of a launch is out of range at index 1"),
    "grid": (altered("launches", 2, 7, "grid"), "load-time value of a grid"),
    "first argument": (altered("launches", 1, 3, "first_argument"), "argument range of a launch"),
    "argument count": (altered("launches", 2, 3, "arguments"), "argument"),
    "dependency": (altered("dependencies", 0, 1, "launch"), "dependency on a later launch"),
    "constant for a pointer": (altered("kinds", 0, 0), r"argument 0 is not of its parameter's type '\*bf16'"),
    "buffer for a number": (altered("kinds", 4, 16, also=[("slots", 256), ("buffers", 2)]), "argument 4 .* 'i32'"),
    "buffer of another type": (altered("buffers", 1, 3, also=[("slots", 0), ("kinds", 20)]), r"argument 1 .* '\*i32'"),
    "load-time value for an i32": (altered("kinds", 4, 1, also=[("slots", 0)]), "argument 4 .* 'i32'"),
    "wide constant": (altered("slots", 4, 1 << 32), "argument 4 .* 'i32'"),
    "scratch": (altered("slots", 5, 8), "argument 5"),
    "edge": (altered("dependencies", 0, 2, "edge"), "edge of a dependency"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_out_of_range(name: str) -> None:
    columns, message = DAMAGE[name]
    index, _ = encoded_plans()
    with pytest.raises(ArtifactError, match=message):
        checked(index, columns.to_bytes())


TOKEN = ProgramKey("token", 1)
GRAPHS: dict[str, tuple[tuple[GraphEntry, ...], str]] = {
    "no steps": ((GraphEntry(TOKEN, ()),), r"graphs\[0\] \(token/1/dense\): it has no steps"),
    "one key twice": ((GraphEntry(TOKEN, (GraphStep(0),)), GraphEntry(TOKEN, (GraphStep(1),))), "two graphs have one key"),
    "no such plan": ((GraphEntry(TOKEN, (GraphStep(0), GraphStep(2))),), "it runs plan 2 of 2"),
    "negative plan": ((GraphEntry(TOKEN, (GraphStep(-1),)),), "it runs plan -1 of 2"),
    "no times": ((GraphEntry(TOKEN, (GraphStep(0, 0),)),), "it runs a plan 0 times"),
    "too many times": ((GraphEntry(TOKEN, (GraphStep(0, MAX_TIMES + 1),)),), f"it runs a plan {MAX_TIMES + 1} times"),
    "a plan's key, twice": ((GraphEntry(PLANS[0].key, (GraphStep(0, 2),)),), "is not that plan once"),
    "a plan's key, another": ((GraphEntry(PLANS[0].key, (GraphStep(1),)),), "is not that plan once"),
}


@pytest.mark.parametrize("name", list(GRAPHS))
def test_graphs_that_cannot_be(name: str) -> None:
    graphs, message = GRAPHS[name]
    index, columns = encoded_plans()
    with pytest.raises(ArtifactError, match=message):
        checked(msgspec.structs.replace(index, graphs=graphs), columns.to_bytes())


def sequence(join: Edge, *, programmatic: bool) -> tuple[PlanIndex, Columns]:
    """A graph that runs two launches twice, of which only the first follows what was before."""
    options = Options(num_warps=4, num_stages=1, programmatic=programmatic)
    kinds: Any = {"contract": 1, "types": (), "constants": (), "divisible": ()}
    first, second = (
        Specialization(kernel="first", options=options, **kinds),
        Specialization(kernel="second", options=Options(num_warps=4, num_stages=1), **kinds),
    )
    launched = (
        Launch(specialization=first, grid=(1, 1, 1), arguments=()),
        Launch(specialization=second, grid=(1, 1, 1), arguments=(), after=((0, Edge.FULL),)),
    )
    index, columns = encode([Plan(ProgramKey("p", 1), launched)], (), ())
    return msgspec.structs.replace(index, graphs=(GraphEntry(TOKEN, (GraphStep(0, 2, join),)),)), columns


def test_a_programmatic_join_needs_a_first_launch_that_waits() -> None:
    for join, programmatic in ((Edge.FULL, False), (Edge.FULL, True), (Edge.PROGRAMMATIC, True)):
        index, columns = sequence(join, programmatic=programmatic)
        checked(index, columns.to_bytes())
    index, columns = sequence(Edge.PROGRAMMATIC, programmatic=False)
    with pytest.raises(ArtifactError, match=r"graphs\[0\].*p/1/dense is joined programmatically"):
        checked(index, columns.to_bytes())


def test_a_programmatic_edge_needs_a_launch_that_waits() -> None:
    index, columns = sequence(Edge.FULL, programmatic=True)
    columns.dependencies["edge"] = Edge.PROGRAMMATIC
    with pytest.raises(ArtifactError, match=r"launch 1 \(second\) may start before another has ended"):
        checked(index, columns.to_bytes())


def test_options_that_only_launch_are_stored_where_they_are_asked_for() -> None:
    plain = Options(num_warps=4, num_stages=1)
    assert msgspec.to_builtins(plain) == {
        "num_warps": 4, "num_stages": 1, "maxnreg": 0, "programmatic": False, "fusion": True
    }  # fmt: skip
    asked = msgspec.structs.replace(plain, carveout=0, shared=512)
    assert msgspec.to_builtins(asked).items() - msgspec.to_builtins(plain).items() == {("carveout", 0), ("shared", 512)}
    for options in (plain, asked):
        assert msgspec.json.decode(msgspec.json.encode(options), type=Options) == options


def test_size() -> None:
    index, columns = encoded_plans()
    with pytest.raises(ArtifactError, match=r"bytes, .* expected from the plan index"):
        columns_from_bytes(index, columns.to_bytes()[:-8], "p.bin")
    with pytest.raises(ArtifactError, match="do not cover the launch column"):
        columns_from_bytes(msgspec.structs.replace(index, plans=index.plans[:1]), columns.to_bytes(), "p.bin")
    assert len(PLANS) == len(index.plans)
