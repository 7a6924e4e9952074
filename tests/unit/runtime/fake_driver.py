"""A CUDA driver in memory, with the conventions of `cuda.bindings.driver`: the status first, then the results.

Device memory is bytearrays at made-up addresses; host addresses are real. Work on a stream waits until something waits for
it, so that staging reused too early shows as wrong data. Handles, sizes, pinned sources and shared memory are checked as a
driver would, or more strictly. Structs and enumerations are the real ones: importing them needs no driver.
"""

# ruff: noqa: N802 - the functions have the names of the driver's
from __future__ import annotations

import ctypes
import functools
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as real
import numpy as np
import pytest

from ouro_build.artifacts.reader import Artifact

_MAGIC = b"FAKE CUBIN "
_DEFAULT_SHARED = 48 << 10


def cubin(function: str, parameters: tuple[tuple[int, int], ...]) -> bytes:
    """An image that the fake loads: one kernel with (offset, size) parameters."""
    return _MAGIC + json.dumps({"function": function, "parameters": parameters}).encode()


def fake_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every artifact have images that the fake loads."""
    read = Artifact.read

    def image(self: Artifact, path: str) -> bytes:
        records = (r for target in self.manifest.targets for r in target.images if r.path == path)
        return next((cubin(r.function, r.parameters) for r in records), None) or read(self, path)

    monkeypatch.setattr(Artifact, "read", image)


class Fault(Exception):
    """A CUDA status other than success."""


@dataclass
class Kernel:
    name: str
    parameters: list[list[int]]
    loaded: bool = False
    max_shared: int = _DEFAULT_SHARED
    carveout: int = -1


@dataclass
class Node:
    """A kernel with everything that a launch of it needs; arguments were read when it was made."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: tuple[int, ...]
    attributes: dict[Any, Any] = field(default_factory=dict)


@dataclass
class Graph:
    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)  # from, to (places in `nodes`), CUgraphDependencyType
    ports: list[int] = field(default_factory=list)
    uploaded: bool = False


def function(outputs: int = 0, context: bool = True) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """Give a method the bindings' conventions: counted, made to fail when told to, its faults returned."""

    def wrap(body: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(body)
        def call(self: FakeDriver, *args: Any) -> tuple[Any, ...]:
            with self.lock:
                try:
                    self.enter(body.__name__, context)
                    result = body(self, *args)
                except Fault as fault:
                    return (getattr(real.CUresult, fault.args[0]), *[None] * outputs)
            return (real.CUresult.CUDA_SUCCESS, *((result,) if outputs == 1 else result if outputs else ()))

        return call

    return wrap


class FakeDriver:
    """Stands in for the module. `bindings` is the major version whose function names it has."""

    def __init__(self, *, bindings: int = 13, devices: int = 1, memory: int = 1 << 30, register: bool = True) -> None:
        self.lock = threading.RLock()
        self.devices, self.memory, self.register = devices, memory, register
        self.owner = 0  # the device that all memory says it is on
        self.taken = 0  # bytes of device memory that something else than `allocations` holds
        self.calls: Counter[str] = Counter()
        self.executed: list[Node] = []
        self.behaviours: dict[str, Callable[[FakeDriver, Node], None]] = {}
        self.allocations: dict[int, np.ndarray] = {}
        self.objects: dict[int, Any] = {}
        self._failures: dict[tuple[str, int], str] = {}
        self._handles = iter(range(0x1000, 1 << 40, 16))
        self._next_address = 1 << 40
        self._retained = 0
        self._thread = threading.local()
        if bindings < 13:
            both = {"cuGraphAddDependencies_v2": self.cuGraphAddDependencies, "cuGraphAddDependencies": self._without_edge_data}
            vars(self).update(both)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AttributeError(name)
        return getattr(real, name)

    # what tests use

    def fail(self, name: str, status: str, at: int = 1) -> None:
        """Let the `at`-th call of `name` from now on return `status`."""
        self._failures[name, self.calls[name] + at] = status

    def live(self) -> dict[str, int]:
        """What has not been given back, by kind."""
        kinds = Counter(type(o).__name__ for o in self.objects.values() if not isinstance(o, (Node, Kernel)))
        if self.allocations:
            kinds["device memory"] = len(self.allocations)
        if self._retained:
            kinds["context"] = self._retained
        return dict(kinds)

    def graphs(self) -> list[Graph]:
        """The instances alive, in the order they were made."""
        return [o.graph for o in self.objects.values() if isinstance(o, Instance)]

    def view(self, address: int, size: int) -> np.ndarray:
        """Device memory as it is now. Faults unless all of it is allocated."""
        for base, data in self.allocations.items():
            if base <= address and address + size <= base + len(data):
                return data[address - base : address - base + size]
        raise Fault("CUDA_ERROR_INVALID_VALUE")

    # the machinery

    def enter(self, name: str, context: bool) -> None:
        self.calls[name] += 1
        if status := self._failures.pop((name, self.calls[name]), None):
            raise Fault(status)
        if context and not (self._retained and getattr(self._thread, "current", False)):
            raise Fault("CUDA_ERROR_INVALID_CONTEXT")

    def add(self, value: Any, handle: Callable[[int], Any]) -> Any:
        number = next(self._handles)
        self.objects[number] = value
        return handle(number)

    def get(self, handle: Any, kind: type[Any]) -> Any:
        found = self.objects.get(int(handle))
        if not isinstance(found, kind):
            raise Fault("CUDA_ERROR_INVALID_HANDLE")
        return found

    def drop(self, handle: Any, kind: type[Any]) -> None:
        self.get(handle, kind)
        del self.objects[int(handle)]

    def submit(self, stream: Any, work: Callable[[], None]) -> None:
        self.get(stream, Stream).work.append(work)

    def pinned(self, address: int, size: int) -> bool:
        blocks = [o for o in self.objects.values() if isinstance(o, Pinned)]
        return any(b.address <= address and address + size <= b.address + b.size for b in blocks)

    def node_of(self, func: Any, grid: Any, block: Any, shared: int, pointers: int) -> Node:
        kernel: Kernel = self.get(func, Kernel)
        if not kernel.loaded or shared > kernel.max_shared or min(*grid, *block) < 1 or max(grid[1:]) > 65535:
            raise Fault("CUDA_ERROR_INVALID_VALUE")
        addresses = (ctypes.c_uint64 * len(kernel.parameters)).from_address(int(pointers))
        pairs = zip(addresses, kernel.parameters, strict=True)
        arguments = tuple(int.from_bytes(ctypes.string_at(at, size), "little") for at, (_, size) in pairs)
        return Node(kernel, tuple(grid), tuple(block), shared, arguments)

    def execute(self, node: Node) -> None:
        self.executed.append(node)
        if behaviour := self.behaviours.get(node.kernel.name):
            behaviour(self, node)

    # device and context

    @function(context=False)
    def cuInit(self, flags: int) -> None:
        if not self.devices:
            raise Fault("CUDA_ERROR_NO_DEVICE")

    def cuGetErrorName(self, status: Any) -> tuple[Any, Any]:
        return real.CUresult.CUDA_SUCCESS, real.CUresult(status).name.encode()

    def cuGetErrorString(self, status: Any) -> tuple[Any, Any]:
        return real.CUresult.CUDA_SUCCESS, real.CUresult(status).name.removeprefix("CUDA_ERROR_").lower().encode()

    @function(1, context=False)
    def cuDeviceGetCount(self) -> int:
        return self.devices

    @function(1, context=False)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return real.CUdevice(ordinal)

    @function(1, context=False)
    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return b"Fake GPU".ljust(length, b"\0")

    @function(1, context=False)
    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        names = {"CAPABILITY_MAJOR": 9, "CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132, "REGISTER_SUPPORTED": self.register}
        return next(int(value) for name, value in names.items() if attribute.name.endswith(name))

    @function(1, context=False)
    def cuDriverGetVersion(self) -> int:
        return 13010

    @function(1, context=False)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self._retained += 1
        return real.CUcontext(1)

    @function(context=False)
    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        self._retained -= 1

    @function(context=False)
    def cuCtxSetCurrent(self, context: Any) -> None:
        self._thread.current = int(context) == 1

    @function(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.memory - self.taken - sum(map(len, self.allocations.values())), self.memory

    # memory

    @function(1)
    def cuMemAlloc(self, size: int) -> Any:
        if size <= 0:
            raise Fault("CUDA_ERROR_INVALID_VALUE")
        if sum(map(len, self.allocations.values())) + size > self.memory:
            raise Fault("CUDA_ERROR_OUT_OF_MEMORY")
        address, self._next_address = self._next_address, self._next_address + -(-size // 512) * 512 + 512
        self.allocations[address] = np.full(size, 0xA5, np.uint8)
        return real.CUdeviceptr(address)

    @function(1)
    def cuPointerGetAttribute(self, attribute: Any, address: int) -> int:
        self.view(int(address), 1)
        kinds = real.CUpointer_attribute
        answers = {kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 2, kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: self.owner}
        return answers[attribute]

    @function()
    def cuCtxSynchronize(self) -> None:
        for stream in [o for o in self.objects.values() if isinstance(o, Stream)]:
            stream.run(None)

    @function()
    def cuMemFree(self, address: Any) -> None:
        if int(address) not in self.allocations:
            raise Fault("CUDA_ERROR_INVALID_VALUE")
        del self.allocations[int(address)]

    @function(1)
    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        data = np.zeros(size, np.uint8)
        self.objects[data.ctypes.data] = Pinned(data.ctypes.data, size, data)
        return int(data.ctypes.data)

    @function()
    def cuMemFreeHost(self, address: int) -> None:
        self.drop(address, Pinned)

    @function()
    def cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self.objects[int(address)] = Pinned(int(address), size, None)

    @function()
    def cuMemHostUnregister(self, address: int) -> None:
        self.drop(address, Pinned)

    @function()
    def cuMemcpyHtoDAsync(self, target: Any, source: int, size: int, stream: Any) -> None:
        def copy() -> None:
            assert self.pinned(source, size), "host memory was given back before the copy ran"
            self.view(int(target), size)[:] = np.frombuffer(ctypes.string_at(source, size), np.uint8)

        self._copy(int(target), source, size, stream, copy)

    @function()
    def cuMemcpyDtoHAsync(self, target: int, source: Any, size: int, stream: Any) -> None:
        def copy() -> None:
            ctypes.memmove(target, self.view(int(source), size).tobytes(), size)

        self._copy(int(source), target, size, stream, copy)

    def _copy(self, device: int, host: int, size: int, stream: Any, copy: Callable[[], None]) -> None:
        self.view(device, size)
        if not self.pinned(host, size):
            raise Fault("CUDA_ERROR_INVALID_VALUE")
        self.submit(stream, copy)

    @function()
    def cuMemcpyDtoDAsync(self, target: Any, source: Any, size: int, stream: Any) -> None:
        a, b = int(target), int(source)
        self.view(a, size)
        self.view(b, size)
        if abs(a - b) < size:
            raise Fault("CUDA_ERROR_INVALID_VALUE")  # they overlap

        def copy() -> None:
            self.view(a, size)[:] = self.view(b, size)

        self.submit(stream, copy)

    @function()
    def cuMemsetD2D8Async(self, target: Any, pitch: int, byte: int, width: int, height: int, stream: Any) -> None:
        if not 0 < width <= pitch or height < 1 or pitch >= 2**31:
            raise Fault("CUDA_ERROR_INVALID_VALUE")
        starts = [int(target) + line * pitch for line in range(height)]
        self.view(starts[0], starts[-1] - starts[0] + width)

        def fill() -> None:
            for start in starts:
                self.view(start, width).fill(byte)

        self.submit(stream, fill)

    @function()
    def cuMemsetD8Async(self, target: Any, byte: int, size: int, stream: Any) -> None:
        self.view(int(target), size)
        self.submit(stream, lambda: self.view(int(target), size).fill(byte))

    # streams and events

    @function(1)
    def cuStreamCreate(self, flags: int) -> Any:
        return self.add(Stream(), real.CUstream)

    @function()
    def cuStreamDestroy(self, stream: Any) -> None:
        self.drop(stream, Stream)

    @function()
    def cuStreamSynchronize(self, stream: Any) -> None:
        self.get(stream, Stream).run(None)

    @function(1)
    def cuEventCreate(self, flags: int) -> Any:
        return self.add(Event(), real.CUevent)

    @function()
    def cuEventDestroy(self, event: Any) -> None:
        self.drop(event, Event)

    @function()
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        mark: Event = self.get(event, Event)
        mark.stream, mark.work = self.get(stream, Stream), lambda: None
        self.submit(stream, mark.work)

    @function()
    def cuEventSynchronize(self, event: Any) -> None:
        mark: Event = self.get(event, Event)
        if mark.stream and mark.work in mark.stream.work:
            mark.stream.run(mark.work)

    # images

    @function(1)
    def cuLibraryLoadData(self, image: bytes, *options: Any) -> Any:
        if not image.startswith(_MAGIC):
            raise Fault("CUDA_ERROR_INVALID_IMAGE")
        content = json.loads(image[len(_MAGIC) :])
        return self.add(Library(Kernel(content["function"], content["parameters"])), real.CUlibrary)

    @function()
    def cuLibraryUnload(self, library: Any) -> None:
        self.drop(library, Library)

    @function(1)
    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:
        kernel = self.get(library, Library).kernel
        if kernel.name.encode() != name:
            raise Fault("CUDA_ERROR_NOT_FOUND")
        return self.add(kernel, real.CUkernel)

    @function(1)
    def cuKernelGetFunction(self, kernel: Any) -> Any:
        return self.add(self.get(kernel, Kernel), real.CUfunction)

    @function()
    def cuFuncLoad(self, func: Any) -> None:
        self.get(func, Kernel).loaded = True

    @function(2)
    def cuFuncGetParamInfo(self, func: Any, at: int) -> tuple[int, int]:
        parameters = self.get(func, Kernel).parameters
        if at >= len(parameters):
            raise Fault("CUDA_ERROR_INVALID_VALUE")
        return parameters[at][0], parameters[at][1]

    @function()
    def cuFuncSetAttribute(self, func: Any, attribute: Any, value: int) -> None:
        kernel, ids = self.get(func, Kernel), real.CUfunction_attribute
        if attribute == ids.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            kernel.carveout = value
        else:
            assert attribute == ids.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            kernel.max_shared = value

    # launches and graphs

    @function()
    def cuLaunchKernel(self, func: Any, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, *rest: Any) -> None:
        shared, stream, pointers, _ = rest
        node = self.node_of(func, (gx, gy, gz), (bx, by, bz), shared, pointers)
        self.submit(stream, lambda: self.execute(node))

    @function()
    def cuLaunchKernelEx(self, config: Any, func: Any, pointers: int, extra: int) -> None:
        c = config
        grid, block = (c.gridDimX, c.gridDimY, c.gridDimZ), (c.blockDimX, c.blockDimY, c.blockDimZ)
        node = self.node_of(func, grid, block, c.sharedMemBytes, pointers)
        node.attributes = {a.id: _copied(a.value) for a in c.attrs}
        assert len(node.attributes) == c.numAttrs
        self.submit(c.hStream, lambda: self.execute(node))

    @function(1)
    def cuGraphCreate(self, flags: int) -> Any:
        return self.add(Graph(), real.CUgraph)

    @function()
    def cuGraphDestroy(self, graph: Any) -> None:
        for node in self.get(graph, Graph).nodes:
            self.objects.pop(node, None)
        self.drop(graph, Graph)

    @function(1)
    def cuGraphAddKernelNode(self, graph: Any, after: list[Any], count: int, p: Any) -> Any:
        grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
        node = self.node_of(p.func, grid, block, p.sharedMemBytes, p.kernelParams)
        found: Graph = self.get(graph, Graph)
        handle = self.add(node, real.CUgraphNode)
        found.nodes.append(int(handle))
        assert count == len(after)
        self._connect(found, after, [handle] * count, [real.CUgraphEdgeData() for _ in after])
        return handle

    @function()
    def cuGraphKernelNodeSetAttribute(self, node: Any, name: Any, value: Any) -> None:
        self.get(node, Node).attributes[name] = _copied(value)

    @function()
    def cuGraphAddDependencies(self, graph: Any, sources: Any, targets: Any, edges: Any, count: int) -> None:
        assert len(sources) == len(targets) == len(edges) == count
        self._connect(self.get(graph, Graph), sources, targets, edges)

    def _without_edge_data(self, graph: Any, sources: Any, targets: Any, count: int) -> None:
        """The older form; a call with edge data is a TypeError, as there."""

    def _connect(self, graph: Graph, sources: Any, targets: Any, edges: Any) -> None:
        for source, target, edge in zip(sources, targets, edges, strict=True):
            try:
                pair = graph.nodes.index(int(source)), graph.nodes.index(int(target))
            except ValueError:
                raise Fault("CUDA_ERROR_INVALID_VALUE") from None
            if pair in [(a, b) for a, b, _ in graph.edges]:
                raise Fault("CUDA_ERROR_INVALID_VALUE")
            graph.edges.append((*pair, int(edge.type)))
            graph.ports.append(edge.from_port)

    @function(1)
    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        found: Graph = self.get(graph, Graph)
        return self.add(Instance(found, [self.get(n, Node) for n in found.nodes]), real.CUgraphExec)

    @function()
    def cuGraphUpload(self, instance: Any, stream: Any) -> None:
        self.get(stream, Stream)
        self.get(instance, Instance).graph.uploaded = True

    @function()
    def cuGraphExecDestroy(self, instance: Any) -> None:
        self.drop(instance, Instance)

    @function()
    def cuGraphLaunch(self, instance: Any, stream: Any) -> None:
        nodes: list[Node] = self.get(instance, Instance).nodes

        def replay() -> None:
            for node in nodes:
                self.execute(node)

        self.submit(stream, replay)


def _copied(value: Any) -> Any:
    """A launch attribute's value as it is now: what a call is given may be a view of a struct that goes away."""
    copy = real.CUlaunchAttributeValue()
    ctypes.memmove(copy.getPtr(), value.getPtr(), len(value.pad))
    return copy


@dataclass
class Pinned:
    address: int
    size: int
    data: np.ndarray | None


@dataclass
class Event:
    stream: Stream | None = None
    work: Callable[[], None] | None = None


@dataclass
class Library:
    kernel: Kernel


@dataclass
class Instance:
    graph: Graph
    nodes: list[Node]


class Stream:
    """Work submitted and not yet done."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self, last: Callable[[], None] | None) -> None:
        """Do the work up to `last`, or all of it."""
        while self.work:
            done = self.work.pop(0)
            done()
            if done is last:
                return
