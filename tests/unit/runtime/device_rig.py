"""A small target over the fake driver: two kernels, two plans, every kind of argument and edge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from ouro_build.artifacts.columns import Columns, GraphEntry, LoadTimeEntry, PlanIndex, encode
from ouro_build.artifacts.manifest import ImageRecord
from ouro_build.artifacts.plan import Buffer, Edge, Launch, LoadTimeValue, Options, Plan, Pool, ProgramKey, Specialization
from ouro_build.artifacts.plan_checks import check_graphs
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.images import Images
from ouro_build.runtime.relocate import RelocatedPlans
from tests.unit.runtime.fake_driver import FakeDriver, cubin

STRIDE = LoadTimeValue.KV_PLANE_STRIDE
SIZES = {Pool.WEIGHTS: 1024, Pool.KV: 512, Pool.STATE: 256, Pool.WORKSPACE: 512, Pool.IO: 0}
VALUES = {LoadTimeValue.KV_BLOCKS: 7, STRIDE: 4096, LoadTimeValue.SM_COUNT: 132}
LOAD_TIME = (LoadTimeEntry(STRIDE, 16),)

CHAIN, DIAMOND = ProgramKey("chain", 1), ProgramKey("diamond", 2)
WEIGHT = Buffer("weight", Pool.WEIGHTS, "bfloat16", (64,), 256)
KV = Buffer("kv", Pool.KV, "bfloat16", (LoadTimeValue.KV_BLOCKS, 4), 0)
A, B = Buffer("a", Pool.WORKSPACE, "float32", (16,), 0), Buffer("b", Pool.WORKSPACE, "float32", (16,), 256)


def _specialization(kernel: str, *types: tuple[str, str]) -> Specialization:
    options = Options(num_warps=4, num_stages=2, programmatic=True)
    return Specialization(kernel=kernel, contract=1, types=types, constants=(), divisible=(), options=options)


SCALE = _specialization("scale", ("x", "*fp32"), ("w", "*bf16"), ("y", "*fp32"), ("n", "i32"), ("eps", "fp32"))
SPREAD = _specialization("spread", ("x", "*fp32"), ("kv", "*bf16"), ("stride", "i64"))


def scale(x: Buffer, y: Buffer, *after: tuple[int, Edge]) -> Launch:
    return Launch(specialization=SCALE, grid=(3, 2, 1), arguments=(x, WEIGHT, y, -5, 0.5), after=after)


def spread(x: Buffer, *after: tuple[int, Edge]) -> Launch:
    return Launch(specialization=SPREAD, grid=(LoadTimeValue.SM_COUNT, 1, 1), arguments=(x, KV, STRIDE), after=after)


PLANS = (
    Plan(CHAIN, (scale(A, B), spread(B, (0, Edge.FULL)), scale(B, A, (1, Edge.FULL)))),
    Plan(
        DIAMOND,
        (
            scale(A, B),
            spread(B, (0, Edge.PROGRAMMATIC)),
            spread(A, (0, Edge.FULL)),
            scale(B, A, (1, Edge.PROGRAMMATIC), (2, Edge.FULL)),
        ),
    ),
)


def image(name: str, parameters: tuple[tuple[int, int], ...], shared: int = 0, **changes: object) -> ImageRecord:
    record: dict[str, object] = {"path": f"{name}.cubin", "function": name, "registers": 32, "spills": 0, "shared": shared}
    record |= {"num_warps": 4, "cluster": (1, 1, 1), "cooperative": False, "parameters": parameters}
    return ImageRecord(**(record | changes))  # type: ignore[arg-type]


SCALE_PARAMETERS = ((0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8))
SPREAD_PARAMETERS = ((0, 8), (8, 8), (16, 8), (24, 8), (32, 8))
IMAGES = (image("scale", SCALE_PARAMETERS, shared=100 << 10), image("spread", SPREAD_PARAMETERS))
FILES = {"scale.cubin": cubin("scale", SCALE_PARAMETERS), "spread.cubin": cubin("spread", SPREAD_PARAMETERS)}


def encoded(plans: tuple[Plan, ...] = PLANS) -> tuple[PlanIndex, Columns]:
    return encode(plans, (WEIGHT, KV, A, B), LOAD_TIME)


@dataclass
class Rig:
    api: FakeDriver
    driver: Driver
    memory: DeviceMemory
    plans: RelocatedPlans
    images: Images


@contextmanager
def opened(
    api: FakeDriver,
    images: tuple[ImageRecord, ...] = IMAGES,
    plans: tuple[Plan, ...] = PLANS,
    graphs: tuple[GraphEntry, ...] | None = None,
) -> Iterator[Rig]:
    """Everything below an executor, open; all of it given back at the end. `graphs` replace those of single plans."""
    index, columns = encoded(plans)
    if graphs is not None:
        index = msgspec.structs.replace(index, graphs=graphs)
    check_graphs(index, columns, "rig")
    driver = open_driver(0, api)
    memory = DeviceMemory(driver, SIZES)
    loaded = Images(driver, images, index.specializations, FILES.__getitem__)
    yield Rig(api, driver, memory, RelocatedPlans(index, columns, memory, VALUES), loaded)
    loaded.close()
    memory.close()
    driver.close()
    assert api.live() == {}
