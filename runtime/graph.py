"""The graph executor: each graph, a sequence of plans, rebuilt as a CUDA graph, instantiated once, replayed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ouro_build.artifacts.errors import DeviceError, RestoreError
from ouro_build.artifacts.plan import Edge, ProgramKey
from ouro_build.artifacts.records import CoverageRecord
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.images import LoadedKernel
from ouro_build.runtime.relocate import Ready, RelocatedPlans

_PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: the edge leaves where the kernel lets its dependents start


class Restored(msgspec.Struct):
    """What restoring took: graphs, their kernel nodes, and seconds."""

    graphs: int = 0
    nodes: int = 0
    seconds: float = 0.0


class GraphExecutor:
    """Restores graphs and replays them on the memory's stream.

    Its keys are graph keys; `keys` limits which are restored (None: all). A graph that the driver refuses is left out, and
    `failures` says why. `restored` counts the others. Raises DeviceError if the worker is ready already.
    """

    name: ExecutorName = "graph"

    def __init__(
        self,
        memory: DeviceMemory,
        plans: RelocatedPlans,
        kernels: Sequence[LoadedKernel],
        keys: Iterable[ProgramKey] | None = None,
    ) -> None:
        memory.driver.check_unsealed("restoring graphs")
        self._driver = memory.driver
        self._stream = memory.stream
        self._replay = self._driver.api.cuGraphLaunch
        self._plans = plans
        self._builder = _Builder(self._driver, kernels)
        self._graphs: dict[ProgramKey, Any] = {}
        self.failures: dict[ProgramKey, RestoreError] = {}
        self.restored = Restored()
        started = time.perf_counter()
        for key in plans.graphs if keys is None else keys:
            self._restore(key)
        self.restored.seconds = time.perf_counter() - started

    def has(self, key: ProgramKey) -> bool:
        return key in self._graphs

    def run(self, key: ProgramKey) -> None:
        (status,) = self._replay(self._graphs[key], self._stream)
        if status:
            raise self._driver.error(status, f"replaying the graph of {key}")

    def close(self) -> None:
        for graph in self._graphs.values():
            self._driver.release("cuGraphExecDestroy", graph)
        self._graphs.clear()

    def _restore(self, key: ProgramKey) -> None:
        if key not in self._plans.graphs:
            self.failures[key] = RestoreError("the artifact has no such graph", where=str(key))
            return
        try:
            self._graphs[key] = self._instantiate(key)
        except DeviceError as error:
            self.failures[key] = RestoreError(f"its graph cannot be restored: {error.what}", where=str(key), hint=error.hint)

    def _instantiate(self, key: ProgramKey) -> Any:
        driver = self._driver
        graph = driver.call("cuGraphCreate", 0, doing=f"creating the graph of {key}")
        try:
            nodes = self._builder.fill(graph, self._plans, key)
            instance = driver.call("cuGraphInstantiate", graph, 0, doing=f"instantiating the graph of {key}")
        finally:
            driver.release("cuGraphDestroy", graph)  # an instance does not need what it was made from
        status, *_ = driver.api.cuGraphUpload(instance, self._stream)
        if status:
            driver.release("cuGraphExecDestroy", instance)
            raise driver.error(status, f"uploading the graph of {key}")
        self.restored.graphs += 1
        self.restored.nodes += nodes
        return instance


def restore_order(keys: Iterable[ProgramKey], coverage: CoverageRecord | None = None) -> list[ProgramKey]:
    """The graph keys in the order in which to restore them: those that `coverage` saw replayed most, then small buckets."""
    seen = () if coverage is None else coverage.keys
    replays = {ProgramKey(k.program, k.bucket, k.mode, k.variant): k.replays for k in seen}
    return sorted(keys, key=lambda key: (-replays.get(key, 0), key.bucket))


_Linked = tuple[Ready, list[tuple[int, int]]]
"""A launch, and the (launch, edge) pairs of its run that it depends on."""


class _Joined(msgspec.Struct):
    """A graph as far as it is filled: its nodes, those that nothing follows yet, and the programmatic edges to be added."""

    nodes: int = 0
    ends: list[Any] = msgspec.field(default_factory=list)
    sources: list[Any] = msgspec.field(default_factory=list)
    targets: list[Any] = msgspec.field(default_factory=list)


class _Builder:
    """Adds plans' launches to a graph as kernel nodes: about ten microseconds a node, so nothing is made twice."""

    def __init__(self, driver: Driver, kernels: Sequence[LoadedKernel]) -> None:
        self._driver = driver
        self._kernels = kernels
        self._parameters = [_node_parameters(driver.api, kernel) for kernel in kernels]
        self._edge = _programmatic_edge(driver.api)
        # 12.x bindings have two forms, of which the one with edge data is called _v2; later ones have that alone.
        with_data = "cuGraphAddDependencies_v2"
        self._add_edges = with_data if hasattr(driver.api, with_data) else "cuGraphAddDependencies"

    def fill(self, graph: Any, plans: RelocatedPlans, key: ProgramKey) -> int:
        """Add every launch and every dependency of the graph `key`, run by run; returns the number of nodes."""
        joined = _Joined()
        for step in plans.graphs[key]:
            launches, dependencies = plans.launches(step.key), plans.dependencies(step.key)
            for _ in range(step.times):
                self._add_run(graph, key, joined, step.join, list(zip(launches, dependencies, strict=True)))
        if joined.sources:
            edges = [self._edge] * len(joined.sources)
            doing = f"adding {len(edges)} programmatic edges to the graph of {key}"
            self._driver.call(self._add_edges, graph, joined.sources, joined.targets, edges, len(edges), doing=doing)
        return joined.nodes

    def _add_run(self, graph: Any, key: ProgramKey, joined: _Joined, join: Edge, launches: list[_Linked]) -> None:
        """Add one run of a plan. Its first launches follow, by `join`, the launches that ended the run before it."""
        nodes: list[Any] = []
        for launch, after in launches:
            before = [(nodes[at], edge) for at, edge in after] if after else [(node, join) for node in joined.ends]
            node = self._add(graph, launch, [other for other, edge in before if edge == Edge.FULL], key)
            for other, edge in before:
                if edge == Edge.PROGRAMMATIC:
                    joined.sources.append(other)
                    joined.targets.append(node)
            nodes.append(node)
        followed = {at for _, after in launches for at, _ in after}
        if nodes:  # else the next run follows what this one would have followed
            joined.ends = [node for at, node in enumerate(nodes) if at not in followed]
        joined.nodes += len(nodes)

    def _add(self, graph: Any, launch: Ready, after: list[Any], key: ProgramKey) -> Any:
        at, x, y, z, arguments = launch
        parameters = self._parameters[at]
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = x, y, z
        parameters.kernelParams = arguments
        status, node = self._driver.api.cuGraphAddKernelNode(graph, after, len(after), parameters)
        if status:
            raise self._driver.error(status, f"adding a node to the graph of {key}")
        for name, value in self._kernels[at].attributes:
            doing = f"setting a launch attribute in the graph of {key}"
            self._driver.call("cuGraphKernelNodeSetAttribute", node, name, value, doing=doing)
        return node


def _node_parameters(api: Any, kernel: LoadedKernel) -> Any:
    """A node's parameters, but for grid and arguments: one struct a kernel, refilled for each of its launches."""
    parameters = api.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = kernel.function
    parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = kernel.threads, 1, 1
    parameters.sharedMemBytes = kernel.shared
    return parameters


def _programmatic_edge(api: Any) -> Any:
    edge = api.CUgraphEdgeData()
    edge.from_port = _PROGRAMMATIC_PORT
    edge.type = api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return edge
