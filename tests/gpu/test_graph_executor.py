"""Graphs and launches of real kernels. Numbers are small integers in float32, so every result is exact."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
pytest.importorskip("triton", reason="needs triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ouro_build.artifacts.columns import GraphEntry, GraphStep, encode
from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import ImageRecord
from ouro_build.artifacts.plan import Buffer, Edge, Launch, LoadTimeValue, Options, Plan, Pool, ProgramKey, Specialization
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.graph import GraphExecutor
from ouro_build.runtime.images import Images
from ouro_build.runtime.launch import LaunchExecutor
from ouro_build.runtime.machine import describe, probe
from ouro_build.runtime.relocate import RelocatedPlans
from tests.gpu.alone import ALONE
from tests.gpu.sample_kernels import affine, turn

MACHINE = probe()
pytestmark = pytest.mark.skipif(bool(MACHINE.reason), reason=f"no CUDA device: {MACHINE.reason}")

BLOCK, BLOCKS = 256, 264
N = BLOCK * BLOCKS
CHAIN = 40
STRIDE = LoadTimeValue.KV_PLANE_STRIDE
VALUES = {LoadTimeValue.KV_BLOCKS: BLOCKS, STRIDE: 48, LoadTimeValue.SM_COUNT: BLOCKS}
SHARED = 64 << 10  # more than a block gets without asking
SIZES = {Pool.WEIGHTS: 4 * N, Pool.WORKSPACE: 8 * N}
W = Buffer("w", Pool.WEIGHTS, "float32", (N,), 0)
A, B = Buffer("a", Pool.WORKSPACE, "float32", (N,), 0), Buffer("b", Pool.WORKSPACE, "float32", (N,), 4 * N)


_TYPES = (("x", "*fp32"), ("w", "*fp32"), ("out", "*fp32"), ("n", "i32"), ("scale", "fp32"), ("stride", "i64"))
# Natural alignment of the types, then the two scratch pointers.
_PARAMETERS = ((0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8), (48, 8))


def specialization(name: str) -> Specialization:
    options = Options(num_warps=4, num_stages=2)
    constants = (("BLOCK", BLOCK),)
    return Specialization(kernel=name, contract=1, types=_TYPES, constants=constants, divisible=(), options=options)


def compiled(function: Any, capability: int) -> tuple[bytes, str]:
    signature = dict(_TYPES) | {"BLOCK": "constexpr"}
    compile_: Any = triton.compile
    source = ASTSource(function, signature, constexprs={"BLOCK": BLOCK})
    kernel = compile_(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 2})
    return kernel.asm["cubin"], kernel.metadata.name


def record(name: str, function: str, shared: int) -> ImageRecord:
    return ImageRecord(
        path=name, function=function, registers=0, spills=0, shared=shared, num_warps=4,
        cluster=(1, 1, 1), cooperative=False, parameters=_PARAMETERS,
    )  # fmt: skip


def plan(name: str, edge: Edge) -> Plan:
    spec, steps = specialization(name), []
    for i in range(CHAIN):
        x, out = (A, B) if i % 2 == 0 else (B, A)
        grid = (LoadTimeValue.SM_COUNT, 1, 1) if i % 3 else (BLOCKS, 1, 1)
        after = ((i - 1, edge),) if i else ()
        steps.append(Launch(specialization=spec, grid=grid, arguments=(x, W, out, N, -1.0, STRIDE), after=after))
    return Plan(ProgramKey(name, 1), tuple(steps))


def _edge(name: str) -> Edge:
    return Edge.PROGRAMMATIC if name == "turn" else Edge.FULL


def expected(name: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    for _ in range(CHAIN):
        blocks = x.reshape(BLOCKS, BLOCK)
        x = (blocks[::-1] if name == "turn" else blocks).reshape(-1) * np.float32(-1) + w + np.float32(VALUES[STRIDE])
    return x


class Rig(NamedTuple):
    driver: Driver
    memory: DeviceMemory
    plans: RelocatedPlans
    images: Images
    sequences: RelocatedPlans
    """The same plans, with graphs that run each three times: `(plan's program)_thrice`."""


def _kernels() -> dict[str, Any]:
    return {"affine": affine} | ({"turn": turn} if MACHINE.capability >= (9, 0) else {})


def _files() -> dict[str, tuple[bytes, str]]:
    capability = MACHINE.capability[0] * 10 + MACHINE.capability[1]
    return {name: compiled(function, capability) for name, function in _kernels().items()}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    files = _files()
    plans = tuple(plan(name, _edge(name)) for name in files)
    index, columns = encode(plans, (W, A, B), ())
    driver = open_driver()
    memory = DeviceMemory(driver, SIZES)
    records = [record(name, function, SHARED if name == "affine" else 0) for name, (_, function) in files.items()]
    images = Images(driver, records, index.specializations, lambda path: files[path][0])
    thrice = tuple(
        GraphEntry(ProgramKey(f"{name}_thrice", 1), (GraphStep(i, 1), GraphStep(i, 2, _edge(name))))
        for i, name in enumerate(files)
    )
    sequences = RelocatedPlans(msgspec.structs.replace(index, graphs=thrice), columns, memory, VALUES)
    yield Rig(driver, memory, RelocatedPlans(index, columns, memory, VALUES), images, sequences)
    images.close()
    memory.close()
    driver.close()


def result(rig: Rig, run: Any, seed: int, times: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and what `times` runs make of them; every other byte of the workspace is poisoned."""
    generator = np.random.default_rng(seed)
    x, w = (generator.integers(-8, 8, N).astype(np.float32) for _ in range(2))
    rig.memory.fill(Pool.WORKSPACE, 0xFF)
    rig.memory.write(Pool.WEIGHTS, 0, w)
    rig.memory.write(Pool.WORKSPACE, 0, x)
    for _ in range(times):
        run()
    return x, w, rig.memory.read(Pool.WORKSPACE, 0, 4 * N).view(np.float32)


@pytest.mark.parametrize("name", ["affine", "turn"])
@pytest.mark.parametrize("executor", [GraphExecutor, LaunchExecutor])
def test_a_plan_gives_the_result(rig: Rig, name: str, executor: Any) -> None:
    key = ProgramKey(name, 1)
    if not rig.plans.has(key):
        pytest.skip("programmatic dependencies need sm_90")
    made = executor(rig.memory, rig.plans, rig.images.kernels)
    for seed in range(20):
        x, w, out = result(rig, lambda: made.run(key), seed)
        assert (out == expected(name, x, w)).all()
    made.close()


def test_replays_follow_one_another(rig: Rig) -> None:
    graphs = GraphExecutor(rig.memory, rig.plans, rig.images.kernels)
    assert graphs.failures == {}
    for key in rig.plans.keys:
        x, w, out = result(rig, lambda key=key: graphs.run(key), 1, times=3)
        for _ in range(3):
            x = expected(key.program, x, w)
        assert (out == x).all()
    graphs.close()


def test_runs_within_a_graph_follow_one_another(rig: Rig) -> None:
    graphs = GraphExecutor(rig.memory, rig.sequences, rig.images.kernels)
    assert graphs.failures == {}
    assert graphs.restored.nodes == 3 * CHAIN * len(rig.plans.keys)
    for key in rig.sequences.graphs:
        x, w, out = result(rig, lambda key=key: graphs.run(key), 1)
        for _ in range(3):
            x = expected(key.program.removesuffix("_thrice"), x, w)
        assert (out == x).all()
    graphs.close()


def test_restoring_is_counted_and_quick(rig: Rig) -> None:
    graphs = GraphExecutor(rig.memory, rig.plans, rig.images.kernels)
    graphs.close()
    graphs = GraphExecutor(rig.memory, rig.plans, rig.images.kernels)
    restored = graphs.restored
    assert restored.graphs == len(rig.plans.keys)
    assert restored.nodes == CHAIN * len(rig.plans.keys)
    assert restored.seconds / restored.nodes < 200e-6  # about 20 is usual: this only finds work done twice
    graphs.close()


@ALONE
def test_replaying_allocates_nothing(rig: Rig) -> None:
    graphs = GraphExecutor(rig.memory, rig.plans, rig.images.kernels)
    for key in rig.plans.keys:
        graphs.run(key)
    rig.memory.synchronize()
    before = describe(rig.driver).memory_free
    for _ in range(100):
        for key in rig.plans.keys:
            graphs.run(key)
    rig.memory.synchronize()
    assert describe(rig.driver).memory_free == before
    graphs.close()


def test_specialisations_of_one_file_keep_their_own_carveout(rig: Rig) -> None:
    cubin, function = compiled(affine, MACHINE.capability[0] * 10 + MACHINE.capability[1])
    asked = [-1, 100, 50, 100]
    made = specialization("affine")
    specializations = [msgspec.structs.replace(made, options=msgspec.structs.replace(made.options, carveout=c)) for c in asked]
    records = [record("affine", function, SHARED)] * len(asked)
    ids = rig.driver.api.CUfunction_attribute

    def asks(function: Any, attribute: Any) -> int:
        return int(rig.driver.call("cuFuncGetAttribute", attribute, function, doing="asking for an attribute"))

    with closing(Images(rig.driver, records, specializations, lambda _: cubin)) as images:
        for kernel, carveout in zip(images.kernels, asked, strict=True):
            assert asks(kernel.function, ids.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) == carveout
            assert asks(kernel.function, ids.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) >= SHARED


def test_the_driver_tells_the_real_parameters(rig: Rig) -> None:
    cubin, function = compiled(affine, MACHINE.capability[0] * 10 + MACHINE.capability[1])
    wrong = ImageRecord(
        path="affine", function=function, registers=0, spills=0, shared=0, num_warps=4,
        cluster=(1, 1, 1), cooperative=False, parameters=_PARAMETERS[:-1],
    )  # fmt: skip
    with pytest.raises(ArtifactError, match="the manifest says"):
        Images(rig.driver, (wrong,), (specialization("affine"),), lambda _: cubin)
