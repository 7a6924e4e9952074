"""The checker tells launches at two layers of a buffer apart: where both layers are known, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.plan import Buffer, Launch, LoadTimeValue, Pool
from ouro_build.builder.checker import check
from ouro_build.kernels.spec import Kernel
from tests.unit.builder.plans import kernel, launch, plan

CACHE = Buffer("cache", Pool.STATE, "float32", (2, 4), 0)
A, B = (Buffer(name, Pool.WORKSPACE, "float32", (64,), offset) for name, offset in (("a", 0), ("b", 256)))
POOLS = {Pool.STATE: 256, Pool.WORKSPACE: 512}


def layered(name: str) -> Kernel:
    """The kernel that writes one buffer keeps to a layer of it; so does the one that writes none, of what it reads first."""
    return replace(kernel(name), layered={"0": ("in0",), "1": ("out0",)}.get(name, ()))


def checked(*launches: Launch, buffers: Sequence[Buffer] = (CACHE, A, B)) -> None:
    check([plan(*launches)], buffers, POOLS, layered)


def refused(*launches: Launch, text: str = "launches (0 and 1|1 and 0) use cache in no order") -> None:
    with pytest.raises(BuildError, match=text):
        checked(*launches)


def writer(layer: int | LoadTimeValue | None, after: Sequence[int] = ()) -> Launch:
    return launch([CACHE], after=after, layer=layer)


def reader(layer: int | LoadTimeValue | None, after: Sequence[int] = ()) -> Launch:
    return launch([], [CACHE], after=after, layer=layer)


def test_launches_at_two_layers_need_no_order() -> None:
    checked(writer(0), writer(1))
    checked(writer(0), reader(1))
    checked(reader(0), writer(1))


def test_launches_at_one_layer_need_an_order() -> None:
    refused(writer(1), writer(1))
    refused(writer(1), reader(1))
    refused(reader(0), writer(0))
    checked(writer(1), reader(1, after=[0]))


def test_every_pair_is_looked_at() -> None:
    refused(writer(0), writer(1), reader(1), text="launches 1 and 2 use cache in no order")


@pytest.mark.parametrize("unknown", [None, LoadTimeValue.SM_COUNT, -1])
def test_a_launch_without_a_known_layer_meets_every_other(unknown: int | LoadTimeValue | None) -> None:
    refused(writer(unknown), writer(1))
    refused(reader(unknown), writer(1))
    refused(writer(1), reader(unknown))
    refused(writer(unknown), writer(unknown))
    checked(writer(unknown), writer(1, after=[0]))


def test_a_constant_is_no_known_layer() -> None:
    """Kernels have it as an argument: what else goes by this name may mean something else."""
    one = writer(None)
    constant = msgspec.structs.replace(one.specialization, constants=(("layer", 0),))
    refused(msgspec.structs.replace(one, specialization=constant), writer(1))


def test_a_kernel_that_does_not_declare_the_buffer_touches_all_of_it() -> None:
    """The kernel that writes two buffers has a layer, and declares nothing."""
    refused(writer(0), launch([CACHE, A], after=[], layer=1))


def test_a_launch_given_the_buffer_by_another_parameter_too_touches_all_of_it() -> None:
    refused(writer(0), launch([CACHE], [CACHE], after=[], layer=1))
    refused(writer(0), launch([], [CACHE, CACHE], after=[], layer=1))


def test_layers_change_nothing_about_what_workspace_is_shared() -> None:
    over = Buffer("over", Pool.WORKSPACE, "float32", (64,), 0)
    with pytest.raises(BuildError, match="a and over overlap and are live at the same time"):
        checked(launch([A], after=[], layer=0), launch([over], after=[], layer=1), buffers=(A, over))


def test_layers_change_nothing_about_what_workspace_was_written() -> None:
    refused(
        launch([], [A], after=[], layer=0), launch([A], after=[], layer=1), text="launch 0 reads a before anything wrote it"
    )


Drawn = tuple[bool, int | None, list[int]]
"""Whether a launch writes, at which layer, after which launches."""


@st.composite
def launches(draw: st.DrawFn) -> list[Drawn]:
    """Up to five launches at three layers, or at all: no more pairs than an error shows."""
    layer = st.none() | st.integers(0, 2)
    earlier = [st.lists(st.integers(0, at - 1), max_size=2, unique=True) if at else st.just([]) for at in range(5)]
    return [(draw(st.booleans()), draw(layer), draw(earlier[at])) for at in range(draw(st.integers(1, 5)))]


@settings(max_examples=300)
@given(launches())
def test_exactly_the_pairs_that_meet_in_no_order_are_found(drawn: list[Drawn]) -> None:
    before: list[set[int]] = []
    for _, _, after in drawn:
        before.append(set(after).union(*(before[i] for i in after)))
    expected = {
        (i, j)
        for j, (writes_j, layer_j, _) in enumerate(drawn)
        for i, (writes_i, layer_i, _) in enumerate(drawn[:j])
        if (writes_i or writes_j) and i not in before[j] and (None in (layer_i, layer_j) or layer_i == layer_j)
    }
    made = [(writer if writing else reader)(layer, after) for writing, layer, after in drawn]
    if not expected:
        checked(*made)
        return
    with pytest.raises(BuildError) as caught:
        checked(*made)
    pairs = re.findall(r"launches (\d+) and (\d+) use cache in no order", str(caught.value))
    assert {(min(pair), max(pair)) for pair in (tuple(map(int, pair)) for pair in pairs)} == expected
