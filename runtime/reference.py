"""The reference executor: each kernel's torch reference, over views of the pools.

The slow path that always works, and the truth for the other executors. Imports torch, and `kernels` for the references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ouro_build.artifacts.columns import Columns, PlanIndex, decode_plan
from ouro_build.artifacts.dtypes import nbytes
from ouro_build.artifacts.errors import DeviceError, FitError, MissingExtraError
from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.plan import Argument, Buffer, Launch, LoadTimeValue, Pool, ProgramKey
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.load_time import Values
from ouro_build.runtime.memory import HostMemory, Memory
from ouro_build.runtime.row_modes import NO_CAPTURE

Call = tuple[Callable[..., None], dict[str, Any]]


def require_torch() -> Any:
    """The torch module. Raises MissingExtraError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "the reference executor needs torch", hint="Install it with: pip install 'ouro-build[reference]'"
        ) from error
    return torch


def pool_tensors(memory: Memory, device: int = 0) -> dict[Pool, Any]:
    """Every pool that has bytes as a torch tensor over its very memory, uint8 [bytes], on the host or on CUDA device `device`.

    Raises MissingExtraError without torch, DeviceError if torch sees the pools on another device.
    """
    torch = require_torch()
    return {pool: _arena(torch, memory, pool, device) for pool in Pool if memory.size(pool)}


class ReferenceExecutor:
    """Runs plans by torch on the CPU, or on CUDA device `device` where the pools are there.

    Raises DeviceError if torch sees the pools on another device.
    """

    name: ExecutorName = "reference"

    def __init__(self, index: PlanIndex, columns: Columns, memory: Memory, values: Values, device: int = 0) -> None:
        self._torch = require_torch()
        self._index = index
        self._columns = columns
        self._values = values
        self._memory = memory
        self._device = device
        self._entries = {entry.key: entry for entry in index.plans}
        self._calls: dict[ProgramKey, list[Call]] = {}
        self._views: dict[Buffer, Any] = {}
        self._arenas: Mapping[Pool, Any] = pool_tensors(memory, device)

    def has(self, key: ProgramKey) -> bool:
        return key in self._entries

    def run(self, key: ProgramKey) -> None:
        if key not in self._calls:
            self._calls[key] = self._planned(key)
        # torch works on a stream of its own: each side finishes before the other goes on.
        self._memory.synchronize()
        with self._torch.inference_mode():
            for function, arguments in self._calls[key]:
                function(**arguments)
        if not isinstance(self._memory, HostMemory):
            self._torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._calls.clear()
        self._views.clear()
        self._arenas = {}

    def _planned(self, key: ProgramKey) -> list[Call]:
        plan = decode_plan(self._index, self._columns, self._entries[key])
        return [self._call(launch) for launch in plan.launches]

    def _call(self, launch: Launch) -> Call:
        from ouro_build.kernels import registry

        specialization = launch.specialization
        declared = registry.kernel(specialization.kernel).contract
        if declared != specialization.contract:
            raise FitError(
                f"the artifact was built for contract {specialization.contract} of it, this reference has {declared}",
                where=f"kernel {specialization.kernel}",
                hint="Build the artifact again, or use the ouro-build version that made it.",
            )
        function, parameters = registry.reference(specialization.kernel)
        every = {name: self._value(a) for name, a in launch.named().items()} | dict(specialization.constants)
        return function, {name: every[name] for name in parameters}

    def _value(self, argument: Argument) -> Any:
        if isinstance(argument, Buffer):
            if argument not in self._views:
                self._views[argument] = self._view(argument)
            return self._views[argument]
        return self._values[argument] if isinstance(argument, LoadTimeValue) else argument

    def _view(self, buffer: Buffer) -> Any:
        shape = tuple(self._values[d] if isinstance(d, LoadTimeValue) else d for d in buffer.shape)
        end = buffer.offset + nbytes(buffer.dtype, shape)
        arena = self._arenas.get(buffer.pool)
        if arena is None or end > arena.numel():
            raise DeviceError(f"{buffer.name} ends at byte {end} of a smaller pool", where=buffer.pool.name.lower())
        view = arena[buffer.offset : end].view(getattr(self._torch, buffer.dtype)).view(shape)
        # References see planes first, as kernels do through strides, whatever the order of the pool.
        return view.transpose(0, 1) if buffer.shape[:1] == (LoadTimeValue.KV_BLOCKS,) else view


class UnbuiltModes(ReferenceExecutor):
    """Runs the modes of `recurrent` that have no plan: the dense plan, with what the mode means in place of its attention.

    An artifact of dense programs alone says nothing of what rows retain: it is helped to no other mode.
    """

    def __init__(
        self,
        index: PlanIndex,
        columns: Columns,
        memory: Memory,
        values: Values,
        device: int = 0,
        *,
        geometry: Geometry,
    ) -> None:
        super().__init__(index, columns, memory, values, device)
        self._geometry = geometry

    def has(self, key: ProgramKey) -> bool:
        known = key.program == "recurrent" and key.mode in SPARSE_MODES and len(self._geometry.sparse_modes) > 1
        return known and key not in self._entries and _dense(key) in self._entries

    def _planned(self, key: ProgramKey) -> list[Call]:
        """The rows' contexts are cut once; a layer's attention is several launches, the last of which writes `out`."""
        plan = decode_plan(self._index, self._columns, self._entries[_dense(key)])
        if not self._geometry.references:  # all keys are retained: every mode is dense
            return [self._call(launch) for launch in plan.launches]
        calls, attention = [], dict[str, Any]()
        for launch in plan.launches:
            if not launch.specialization.kernel.startswith(("attention_", "split_contexts")):
                calls.append(self._call(launch))
                continue
            attention |= launch.named() | dict(launch.specialization.constants)
            if "out" in attention:
                calls.append(self._attention(key, attention))
                del attention["out"]
        return calls

    def _attention(self, key: ProgramKey, given: Mapping[str, Any]) -> Call:
        from ouro_build.kernels.sparse_attention import References, sparse_attention

        buffers = {b.name: b for b in self._index.buffers}
        names = ("rows", "q", "block_tables", "kv", "out", "layer", "scale", "LAYERS")
        arguments = {name: self._value(given[name]) for name in names}
        pool = References(**{name: self._value(buffers[name]) for name in References.__annotations__})
        captures = key.variant != NO_CAPTURE
        return sparse_attention, {"mode": key.mode, "captures": captures, "references": pool, **arguments}


def _dense(key: ProgramKey) -> ProgramKey:
    return ProgramKey(key.program, key.bucket)


class _DeviceBytes:
    """Device memory as `__cuda_array_interface__`, through which torch makes a tensor of it without copying."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _arena(torch: Any, memory: Memory, pool: Pool, device: int) -> Any:
    if isinstance(memory, HostMemory):
        return torch.from_numpy(memory.arena(pool))
    arena = torch.as_tensor(_DeviceBytes(memory.base(pool), memory.size(pool)), device=f"cuda:{device}")
    if arena.data_ptr() != memory.base(pool):  # torch copies what lies on another device, and says nothing
        raise DeviceError(f"the pool is not on CUDA device {device}, as torch counts them", where=pool.name.lower())
    return arena
