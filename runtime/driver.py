"""The CUDA driver: one device, its primary context, and calls whose failures say what was being done.

Imports nothing but the errors before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ouro_build.artifacts.errors import DeviceError, NoDeviceError, UsageError

BINDINGS = "cuda.bindings.driver"

_OUT_OF_MEMORY = "Give the worker less (--memory), or stop what else uses this GPU."
_WRONG_IMAGE = "The image was compiled for another GPU or a newer driver: `ouro-artifact fit` says which."
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": _OUT_OF_MEMORY,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _WRONG_IMAGE,
    "CUDA_ERROR_INVALID_IMAGE": _WRONG_IMAGE,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _WRONG_IMAGE,
}
_LOST = "If calls before this one succeeded, the CUDA context is lost: start the worker again."


class Driver:
    """A device and its primary context, which torch in the same process shares.

    `api` is the module `cuda.bindings.driver`, or a stand-in with its conventions: every function returns a tuple, the
    status first. A context is current on the thread that opened it; other threads call `make_current` first.
    """

    def __init__(self, api: Any, ordinal: int) -> None:
        self.api = api
        self.ordinal = ordinal
        self.device = _device(self, ordinal)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device, doing="creating the CUDA context")
        self._sealed = False
        self._closed = False
        self.make_current()

    def call(self, name: str, *args: object, doing: str) -> Any:
        """Call the driver function `name`: None, its one result, or a tuple of them. Raises DeviceError."""
        status, *results = self.invoke(name, *args, doing=doing)
        if status:
            raise self.error(status, doing)
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None

    def invoke(self, name: str, *args: object, doing: str) -> tuple[Any, ...]:
        """Call `name` and return what it returns, status first. Raises DeviceError if this driver lacks the function."""
        try:
            answer: tuple[Any, ...] = getattr(self.api, name)(*args)
        except RuntimeError as error:
            raise DeviceError(f"{doing}: {error}", where=name, hint="Install a driver for CUDA 12.4 or newer.") from error
        return answer

    def release(self, name: str, *args: object) -> None:
        """Give something back. A failure is not raised: after a lost context every release fails, and the cause is known."""
        getattr(self.api, name)(*args)

    def error(self, status: Any, doing: str) -> DeviceError:
        """What to raise for `status`: CUDA's name and text for it, and what was being done."""
        name = describe(self.api, status)
        return DeviceError(f"{doing}: {name}", where=f"device {self.ordinal}", hint=_HINTS.get(name.split(" ")[0], _LOST))

    def make_current(self) -> None:
        """Make the context current on the calling thread."""
        self.call("cuCtxSetCurrent", self.context, doing="entering the CUDA context")

    def seal(self) -> None:
        """From now on nothing may be allocated on the device: the worker is ready."""
        self._sealed = True

    def check_unsealed(self, doing: str) -> None:
        """Raise DeviceError if the worker is ready already. Everything that takes device memory asks this first."""
        if self._sealed:
            raise DeviceError(f"{doing} after the worker was ready; its memory is planned and fixed", where="device memory")

    def close(self) -> None:
        """Give the context back. It lives on while others in the process, such as torch, hold it."""
        if not self._closed:
            self._closed = True
            self.release("cuDevicePrimaryCtxRelease", self.device)


def open_driver(device: int = 0, api: Any = None) -> Driver:
    """Start CUDA on device number `device`. `api` replaces the bindings.

    Raises NoDeviceError with the driver's own words where there is no GPU to use, UsageError for a number that no device
    has, DeviceError if the device cannot be used.
    """
    module = _bindings() if api is None else api
    _initialise(module)
    return Driver(module, device)


def describe(api: Any, status: Any) -> str:
    """CUDA's name and text for a status, e.g. `CUDA_ERROR_OUT_OF_MEMORY (out of memory)`."""
    return f"{_text(api.cuGetErrorName, status)} ({_text(api.cuGetErrorString, status)})"


def _text(look_up: Callable[[Any], tuple[Any, Any]], status: Any) -> str:
    failed, text = look_up(status)
    return f"status {int(status)}" if failed or text is None else text.decode()


def _bindings() -> Any:
    try:
        return importlib.import_module(BINDINGS)
    except ImportError as error:
        raise NoDeviceError(f"the CUDA bindings cannot be imported: {error}", where=BINDINGS, hint=_NO_GPU) from error


_NO_GPU = "Install the NVIDIA driver and check it with `nvidia-smi`. `ouro-worker` can do without: --executor reference."


def _initialise(api: Any) -> None:
    """`cuInit`: without libcuda the bindings raise a RuntimeError, without a GPU the driver returns a status."""
    try:
        (status,) = api.cuInit(0)
    except RuntimeError as error:
        raise NoDeviceError(f"no CUDA driver: {error}", where="cuInit", hint=_NO_GPU) from error
    if status:
        raise NoDeviceError(f"CUDA cannot start: {describe(api, status)}", where="cuInit", hint=_NO_GPU)


def _device(driver: Driver, ordinal: int) -> Any:
    count = driver.call("cuDeviceGetCount", doing="counting the CUDA devices")
    if not count:
        raise NoDeviceError("the driver knows no device", where="cuDeviceGetCount", hint=_NO_GPU)
    if not 0 <= ordinal < count:
        raise UsageError(f"there is no CUDA device {ordinal}; this machine has 0 … {count - 1}", where="--device")
    return driver.call("cuDeviceGet", ordinal, doing=f"opening CUDA device {ordinal}")
