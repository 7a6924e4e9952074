"""The launch executor: the same plans, kernel by kernel. The path of a plan whose graph is not restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ouro_build.artifacts.plan import ProgramKey
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.images import LoadedKernel
from ouro_build.runtime.relocate import Ready, RelocatedPlans

Arguments = tuple[Any, ...]


class LaunchExecutor:
    """Launches plans on the memory's stream, each kernel after the one before it has finished.

    The stream's order is a full dependency on everything earlier, so it serves programmatic edges too.
    """

    name: ExecutorName = "launch"

    def __init__(self, memory: DeviceMemory, plans: RelocatedPlans, kernels: Sequence[LoadedKernel]) -> None:
        self._driver = memory.driver
        self._stream = memory.stream
        self._plans = plans
        self._kernels = kernels
        self._calls: dict[ProgramKey, list[tuple[str, Arguments]]] = {}

    def has(self, key: ProgramKey) -> bool:
        return self._plans.has(key)

    def run(self, key: ProgramKey) -> None:
        if key not in self._calls:
            self._calls[key] = [self._call(launch) for launch in self._plans.launches(key)]
        doing = f"launching {key}"
        for function, arguments in self._calls[key]:
            self._driver.call(function, *arguments, doing=doing)

    def close(self) -> None:
        self._calls.clear()

    def _call(self, launch: Ready) -> tuple[str, Arguments]:
        at, x, y, z, arguments = launch
        kernel = self._kernels[at]
        if kernel.attributes:
            return "cuLaunchKernelEx", (self._config(kernel, x, y, z), kernel.function, arguments, 0)
        block = (kernel.threads, 1, 1)
        return "cuLaunchKernel", (kernel.function, x, y, z, *block, kernel.shared, self._stream, arguments, 0)

    def _config(self, kernel: LoadedKernel, x: int, y: int, z: int) -> Any:
        api = self._driver.api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes, config.hStream = kernel.shared, self._stream
        config.attrs = [_attribute(api, name, value) for name, value in kernel.attributes]
        config.numAttrs = len(kernel.attributes)
        return config


def _attribute(api: Any, name: Any, value: Any) -> Any:
    attribute = api.CUlaunchAttribute()
    attribute.id, attribute.value = name, value
    return attribute
