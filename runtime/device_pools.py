"""Pools on the device, with the executors over them."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec

from ouro_build.artifacts.columns import Columns, PlanIndex
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.reader import Artifact
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.graph import GraphExecutor, restore_order
from ouro_build.runtime.images import Images
from ouro_build.runtime.late import LateReference
from ouro_build.runtime.launch import LaunchExecutor
from ouro_build.runtime.load_time import Values, load_time_values
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.machine import describe
from ouro_build.runtime.paths import WorkerPath, torch_has_cuda
from ouro_build.runtime.pools import Pools, pool_sizes
from ouro_build.runtime.references import fill_references
from ouro_build.runtime.relocate import RelocatedPlans
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.upload import FileUpload, upload_pieces
from ouro_build.runtime.weights import begin_upload, weight_pieces

_MIB = 1 << 20


def open_device_pools(
    artifact: Artifact,
    path: WorkerPath,
    loading: Loading,
    clock: StartupClock,
    driver: Driver,
    upload: FileUpload | None = None,
) -> Pools:
    """Allocate the pools of `path`, fill the weights, load the images and restore the graphs.

    `upload` is that of the artifact's own weights where it has begun already. Takes it and `driver` over: closing the pools
    closes both. After this nothing is allocated on the device, and every byte of the weights has been checked if it was to be.
    """
    manifest, target = artifact.manifest, path.target
    given = loading.given
    with ExitStack() as resources:
        if given is not None:
            resources.callback(given.release)
        resources.callback(driver.close)
        upload = upload or begin_upload(artifact, loading, clock, clock.current)
        if upload is not None:
            resources.callback(upload.close)
            upload.lock(driver)
        with clock.phase("plans"):  # first, since allocating waits while the driver locks pages
            index, columns = artifact.plans(target)
        with clock.phase("pools") as phase:
            machine = describe(driver)
            sizes = pool_sizes(target.memory, path.kv_blocks)
            memory = DeviceMemory(driver, sizes, given=None if given is None else given.addresses(driver, sizes))
            resources.callback(memory.close)
            phase.bytes = memory.allocated
        if upload is not None:
            resources.callback(upload.close)  # the copy ends before its target is given back
            upload.copy(memory)
        values = load_time_values(manifest.kv, path.kv_blocks, machine.sm_count)
        if manifest.geometry.references:
            fill_references(memory, {b.name: b for b in index.buffers}, artifact.retained_counts())
        executors = _executors(artifact, path, (index, columns), loading, memory, values, clock, resources)
        unbuilt = _unbuilt(manifest.geometry, index, columns, memory, values)
        resources.callback(unbuilt.close)
        resources.callback(driver.release, "cuStreamSynchronize", memory.stream)  # graphs and images may still be running
        with clock.phase("weights") as phase:
            phase.bytes = _weights(artifact, loading, memory, upload)
        with clock.phase("settle"):
            memory.synchronize()
            memory.seal()
            held = machine.available - describe(driver).memory_free
        notes = _memory_notes(held, target.memory.reserve + memory.allocated)
        kept = resources.pop_all()
    failures = executors[0].failures if isinstance(executors[0], GraphExecutor) else {}
    settle = _nothing if upload is None else upload.release
    return Pools(index, memory, path.kv_blocks, executors, failures, kept.close, notes, settle, unbuilt)


def _nothing() -> None:
    """What there is to settle where nothing was copied from a file."""


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


def fill_weights(artifact: Artifact, weights: str | None, memory: DeviceMemory) -> int:
    """Put the artifact's weights, or those that `weights` names, into their pool; returns their bytes.

    Raises UsageError if there are none, CheckpointError or ArtifactError if they are not the artifact's.
    """
    loading = Loading(weights=weights)
    with ExitStack() as resources:
        upload = begin_upload(artifact, loading, StartupClock(), "")
        if upload is not None:
            resources.callback(upload.close)
            upload.lock(memory.driver)
            upload.copy(memory)
        return _weights(artifact, loading, memory, upload)


def _weights(artifact: Artifact, loading: Loading, memory: DeviceMemory, upload: FileUpload | None) -> int:
    """Wait for the artifact's own weights, or put others there; returns their bytes."""
    if upload is not None:
        return upload.finish()
    return upload_pieces(memory, weight_pieces(artifact, loading.weights, loading.check_weights))


def _executors(
    artifact: Artifact,
    path: WorkerPath,
    plans: tuple[PlanIndex, Columns],
    loading: Loading,
    memory: DeviceMemory,
    values: Values,
    clock: StartupClock,
    resources: ExitStack,
) -> tuple[Executor, ...]:
    if path.executor == "reference":
        from ouro_build.runtime.reference import ReferenceExecutor

        with clock.phase("executors"):
            reference = ReferenceExecutor(*plans, memory, values, memory.driver.ordinal)
        resources.callback(reference.close)
        return (reference,)
    with clock.phase("images") as phase:
        images = Images(memory.driver, path.target.images, plans[0].specializations, artifact.read)
        resources.callback(images.close)
        phase.bytes = images.bytes
    with clock.phase("relocate"):
        relocated = RelocatedPlans(*plans, memory, values)
    launch = LaunchExecutor(memory, relocated, images.kernels)
    resources.callback(launch.close)
    if path.executor == "launch":
        return (launch,)
    with clock.phase("graphs"):
        graph = GraphExecutor(memory, relocated, images.kernels, restore_order(relocated.graphs, loading.coverage))
        resources.callback(graph.close)
    clock.restored(graph.restored.graphs, graph.restored.nodes)
    return (graph, launch)
