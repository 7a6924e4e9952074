import ctypes

import msgspec
import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.columns import GraphEntry, GraphStep, LoadTimeEntry
from ouro_build.artifacts.errors import DeviceError, FitError
from ouro_build.artifacts.plan import Edge, LoadTimeValue, Pool, ProgramKey
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.relocate import RelocatedPlans, Run
from tests.unit.runtime.device_rig import CHAIN, DIAMOND, SIZES, STRIDE, VALUES, encoded


def slots(plans: RelocatedPlans, address: int, count: int) -> list[int]:
    """What a driver finds at a launch's array of argument pointers."""
    pointers = (ctypes.c_uint64 * count).from_address(address)
    return [ctypes.c_uint64.from_address(p).value for p in pointers]


def test_every_argument_is_what_the_kernel_reads() -> None:
    memory = HostMemory(SIZES)
    plans = RelocatedPlans(*encoded(), memory, VALUES)
    first, second, third = plans.launches(CHAIN)
    work, weights = memory.base(Pool.WORKSPACE), memory.base(Pool.WEIGHTS)
    minus_five = 2**32 - 5
    half = int(np.float32(0.5).view(np.uint32))
    assert first[:4] == (0, 3, 2, 1)
    assert slots(plans, first[4], 7) == [work, weights + 256, work + 256, minus_five, half, 0, 0]
    assert second[:4] == (1, 132, 1, 1)
    assert slots(plans, second[4], 5) == [work + 256, memory.base(Pool.KV), 4096, 0, 0]
    assert slots(plans, third[4], 3) == [work + 256, weights + 256, work]


def test_dependencies_are_counted_within_the_plan() -> None:
    plans = RelocatedPlans(*encoded(), HostMemory(SIZES), VALUES)
    assert plans.dependencies(CHAIN) == [[], [(0, Edge.FULL)], [(1, Edge.FULL)]]
    programmatic = Edge.PROGRAMMATIC
    assert plans.dependencies(DIAMOND) == [[], [(0, programmatic)], [(0, Edge.FULL)], [(1, programmatic), (2, Edge.FULL)]]


def test_keys() -> None:
    plans = RelocatedPlans(*encoded(), HostMemory(SIZES), VALUES)
    assert plans.keys == (CHAIN, DIAMOND)
    assert plans.has(CHAIN)
    assert not plans.has(msgspec.structs.replace(CHAIN, bucket=9))


def test_graphs_are_runs_of_plans_by_their_keys() -> None:
    index, columns = encoded()
    assert RelocatedPlans(index, columns, HostMemory(SIZES), VALUES).graphs == {
        CHAIN: (Run(CHAIN, 1, Edge.FULL),),
        DIAMOND: (Run(DIAMOND, 1, Edge.FULL),),
    }
    token = ProgramKey("token", 1)
    steps = (GraphStep(1), GraphStep(0, 3, Edge.PROGRAMMATIC))
    index = msgspec.structs.replace(index, graphs=(GraphEntry(token, steps),))
    plans = RelocatedPlans(index, columns, HostMemory(SIZES), VALUES)
    assert plans.graphs == {token: (Run(DIAMOND, 1, Edge.FULL), Run(CHAIN, 3, Edge.PROGRAMMATIC))}
    assert plans.keys == (CHAIN, DIAMOND)


def test_a_value_without_its_divisor_is_refused() -> None:
    with pytest.raises(FitError, match="kv_plane_stride is 4104, a multiple of 16 is needed"):
        RelocatedPlans(*encoded(), HostMemory(SIZES), VALUES | {STRIDE: 4104})


@pytest.mark.parametrize("name", [STRIDE, LoadTimeValue.SM_COUNT])
def test_a_value_that_is_not_known_is_refused(name: LoadTimeValue) -> None:
    values = {n: v for n, v in VALUES.items() if n is not name}
    with pytest.raises(FitError, match=f"no value for {name.value}"):
        RelocatedPlans(*encoded(), HostMemory(SIZES), values)


def test_a_divisor_of_an_unused_value_counts_too() -> None:
    index, columns = encoded()
    index = msgspec.structs.replace(index, load_time=(LoadTimeEntry(LoadTimeValue.KV_BLOCKS, 2),))
    with pytest.raises(FitError, match="kv_blocks is 7"):
        RelocatedPlans(index, columns, HostMemory(SIZES), VALUES)


@pytest.mark.parametrize("count", [0, 2**31])
def test_a_grid_that_no_gpu_takes_is_refused(count: int) -> None:
    with pytest.raises(FitError, match=f"launch 1 has a grid of {count} × 1 × 1"):
        RelocatedPlans(*encoded(), HostMemory(SIZES), VALUES | {LoadTimeValue.SM_COUNT: count})


def test_an_address_outside_its_pool_is_refused() -> None:
    with pytest.raises(DeviceError, match="workspace: a plan uses byte 256 of a pool of 256"):
        RelocatedPlans(*encoded(), HostMemory(SIZES | {Pool.WORKSPACE: 256}), VALUES)


def test_plans_without_launches() -> None:
    index, columns = encoded(())
    assert RelocatedPlans(index, columns, HostMemory(SIZES), VALUES).keys == ()
