"""Compiled kernels, loaded before the worker is ready and checked against what the driver says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from ouro_build.artifacts.columns import SCRATCH_ARGUMENTS
from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import ImageRecord
from ouro_build.artifacts.plan import Specialization
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.relocate import SLOT

WARP = 32
"""Threads of a warp, on every GPU so far."""
_DEFAULT_SHARED = 48 << 10  # bytes a block may use without asking


class LoadedKernel(msgspec.Struct, frozen=True):
    """A kernel ready to launch: the driver's function, threads a block, dynamic shared memory in bytes.

    `attributes` are its (id, value) launch attributes: none unless it forms clusters or is cooperative.
    """

    function: Any
    threads: int
    shared: int
    attributes: tuple[tuple[Any, Any], ...]


class Images:
    """The kernels of one target: `kernels[i]` is specialisation i of the plan index.

    `read` gives the bytes of an artifact's file by its path. Raises ArtifactError if an image has other parameters than
    the manifest or the plans say, DeviceError if the driver refuses it.
    """

    def __init__(
        self,
        driver: Driver,
        records: Sequence[ImageRecord],
        specializations: Sequence[Specialization],
        read: Callable[[str], bytes],
    ) -> None:
        driver.check_unsealed("loading images")
        self._driver = driver
        self._libraries: dict[tuple[str, int, int], Any] = {}
        self.bytes = 0
        with ExitStack() as resources:
            self._resources = resources
            self.kernels = tuple(
                self._kernel(record, specialization, read)
                for record, specialization in zip(records, specializations, strict=True)
            )
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Unload the images. Nothing may run them any more."""
        self._resources.close()
        self.kernels = ()

    def _kernel(self, record: ImageRecord, specialization: Specialization, read: Callable[[str], bytes]) -> LoadedKernel:
        call, doing = self._driver.call, f"loading {record.path}"
        carveout, shared = specialization.options.carveout, max(record.shared, specialization.options.shared)
        allowed = shared if shared > _DEFAULT_SHARED else 0
        key = (record.path, carveout, allowed)  # a function's attributes are those of its library
        if key not in self._libraries:
            self._libraries[key] = self._library(read(record.path), doing)
        kernel = call("cuLibraryGetKernel", self._libraries[key], record.function.encode(), doing=doing)
        function = call("cuKernelGetFunction", kernel, doing=doing)
        call("cuFuncLoad", function, doing=doing)  # now, whatever CUDA_MODULE_LOADING says
        _check_parameters(self._driver, function, record, specialization)
        ids, giving = self._driver.api.CUfunction_attribute, f"giving {record.path} its shared memory"
        if allowed:
            attribute = ids.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, attribute, shared, doing=giving)
        if carveout >= 0:
            attribute = ids.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            call("cuFuncSetAttribute", function, attribute, carveout, doing=giving)
        return LoadedKernel(function, WARP * record.num_warps, shared, _attributes(self._driver.api, record))

    def _library(self, image: bytes, doing: str) -> Any:
        library = self._driver.call("cuLibraryLoadData", image, [], [], 0, [], [], 0, doing=doing)
        self._resources.callback(self._driver.release, "cuLibraryUnload", library)
        self.bytes += len(image)
        return library


def _check_parameters(driver: Driver, function: Any, record: ImageRecord, specialization: Specialization) -> None:
    """The driver reads as many slots as the image has parameters, so the three accounts of them must agree."""
    where = f"{record.path} ({specialization.kernel})"
    found = _parameters(driver, function, len(record.parameters), f"asking for the parameters of {record.path}")
    if found != record.parameters:
        raise ArtifactError(f"parameters (offset, bytes) are {found}, the manifest says {record.parameters}", where=where)
    if any(size > SLOT for _, size in found):
        raise ArtifactError(f"a parameter is larger than {SLOT} bytes: {found}", where=where)
    passed = len(specialization.types) + SCRATCH_ARGUMENTS
    if len(found) != passed:
        raise ArtifactError(f"{len(found)} parameters, the plans pass {passed}", where=where)


def _parameters(driver: Driver, function: Any, expected: int, doing: str) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of the image's parameters, at most one more than `expected`."""
    found: list[tuple[int, int]] = []
    while len(found) <= expected:
        status, *answer = driver.invoke("cuFuncGetParamInfo", function, len(found), doing=doing)
        if status == driver.api.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last one
            break
        if status:
            raise driver.error(status, doing)
        found.append((int(answer[0]), int(answer[1])))
    return tuple(found)


def _attributes(api: Any, record: ImageRecord) -> tuple[tuple[Any, Any], ...]:
    ids, found = api.CUlaunchAttributeID, []
    if record.cluster != (1, 1, 1):
        value = api.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = record.cluster
        found.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if record.cooperative:
        value = api.CUlaunchAttributeValue()
        value.cooperative = 1
        found.append((ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    return tuple(found)
