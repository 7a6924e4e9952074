"""Pools on the device, with the executors over them."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from ouro_build.artifacts.columns import Columns, PlanIndex
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.reader import Artifact
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.graph import GraphExecutor
from ouro_build.runtime.images import Images
from ouro_build.runtime.late import LateReference
from ouro_build.runtime.launch import LaunchExecutor
from ouro_build.runtime.load_time import Values, load_time_values
from ouro_build.runtime.machine import describe
from ouro_build.runtime.paths import WorkerPath, torch_has_cuda
from ouro_build.runtime.pools import Pools, pool_sizes
from ouro_build.runtime.references import fill_references
from ouro_build.runtime.relocate import RelocatedPlans
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.upload import upload_file, upload_pieces
from ouro_build.runtime.weights import embedded_weights, weight_pieces

_MIB = 1 << 20


def open_device_pools(artifact: Artifact, path: WorkerPath, weights: str | None, clock: StartupClock, driver: Driver) -> Pools:
    """Allocate the pools of `path`, fill the weights, load the images and restore the graphs.

    Takes `driver` over: closing the pools closes it. After this nothing is allocated on the device.
    """
    manifest, target = artifact.manifest, path.target
    with ExitStack() as resources:
        resources.callback(driver.close)
        index, columns = artifact.plans(target)
        machine = describe(driver)
        values = load_time_values(manifest.kv, path.kv_blocks, machine.sm_count)
        with clock.phase("pools") as phase:
            sizes = pool_sizes(target.memory, path.kv_blocks)
            memory = DeviceMemory(driver, sizes)
            resources.callback(memory.close)
            phase.bytes = memory.allocated
        with clock.phase("weights") as phase:
            phase.bytes = _fill_weights(artifact, weights, memory)
        if manifest.geometry.references:
            fill_references(memory, {b.name: b for b in index.buffers}, artifact.retained_counts())
        executors = _executors(artifact, path, index, columns, memory, values, clock, resources)
        unbuilt = _unbuilt(manifest.geometry, index, columns, memory, values)
        resources.callback(unbuilt.close)
        resources.callback(driver.release, "cuStreamSynchronize", memory.stream)  # graphs and images may still be running
        memory.synchronize()
        memory.seal()
        held = machine.available - describe(driver).memory_free
        notes = _memory_notes(held, target.memory.reserve + sum(sizes.values()))
        kept = resources.pop_all()
    failures = executors[0].failures if isinstance(executors[0], GraphExecutor) else {}
    return Pools(index, memory, path.kv_blocks, executors, failures, kept.close, notes, unbuilt)


def _unbuilt(geometry: Geometry, index: PlanIndex, columns: Columns, memory: DeviceMemory, values: Values) -> LateReference:
    """Modes that were not built, by the reference where torch has CUDA here."""

    def make() -> Executor | None:
        if find_spec("torch") is None or not torch_has_cuda():
            return None
        from ouro_build.runtime.reference import UnbuiltModes

        return UnbuiltModes(index, columns, memory, values, memory.driver.ordinal, geometry=geometry)

    return LateReference(make, lambda key: key.program == "recurrent" and len(geometry.sparse_modes) > 1)


def _memory_notes(held: int, planned: int) -> tuple[str, ...]:
    """What is to be said of `held` bytes of device memory taken since the start, context included, where `planned` were."""
    if held <= planned:
        return ()
    return (f"memory: {held / _MIB:.1f} MiB are in use, {planned / _MIB:.1f} were planned, unless another process took some",)


def _fill_weights(artifact: Artifact, weights: str | None, memory: DeviceMemory) -> int:
    if weights is None and artifact.manifest.weights.embedded:
        file = embedded_weights(artifact)
        return upload_file(memory, Path(file.label), file.data_start, artifact.manifest.weights.file)
    return upload_pieces(memory, weight_pieces(artifact, weights))


def _executors(
    artifact: Artifact,
    path: WorkerPath,
    index: PlanIndex,
    columns: Columns,
    memory: DeviceMemory,
    values: Values,
    clock: StartupClock,
    resources: ExitStack,
) -> tuple[Executor, ...]:
    if path.executor == "reference":
        from ouro_build.runtime.reference import ReferenceExecutor

        reference = ReferenceExecutor(index, columns, memory, values, memory.driver.ordinal)
        resources.callback(reference.close)
        return (reference,)
    with clock.phase("images") as phase:
        images = Images(memory.driver, path.target.images, index.specializations, artifact.read)
        resources.callback(images.close)
        phase.bytes = images.bytes
    with clock.phase("relocate"):
        plans = RelocatedPlans(index, columns, memory, values)
    launch = LaunchExecutor(memory, plans, images.kernels)
    resources.callback(launch.close)
    if path.executor == "launch":
        return (launch,)
    with clock.phase("graphs"):
        graph = GraphExecutor(memory, plans, images.kernels)
        resources.callback(graph.close)
    return (graph, launch)
