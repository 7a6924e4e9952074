import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import DeviceError, NoDeviceError, UsageError
from ouro_build.runtime import driver as driver_module
from ouro_build.runtime.driver import open_driver
from tests.unit.runtime.fake_driver import FakeDriver


def _raiser(text: str) -> Callable[..., None]:
    """A driver function as the bindings have it where the library or the function is missing."""

    def function(*args: object) -> None:
        raise RuntimeError(text)

    return function


def test_opens_the_primary_context_and_gives_it_back_once() -> None:
    api = FakeDriver()
    driver = open_driver(0, api)
    assert api.live() == {"context": 1}
    driver.close()
    driver.close()
    assert api.live() == {}


def test_results_have_the_shape_of_what_is_returned() -> None:
    driver = open_driver(0, FakeDriver(memory=1000))
    assert driver.call("cuDeviceGetCount", doing="x") == 1
    assert driver.call("cuMemGetInfo", doing="x") == (1000, 1000)
    assert driver.call("cuCtxSetCurrent", driver.context, doing="x") is None


def test_a_failure_names_the_status_and_what_was_being_done() -> None:
    api = FakeDriver(memory=1000)
    driver = open_driver(0, api)
    with pytest.raises(DeviceError) as caught:
        driver.call("cuMemAlloc", 2000, doing="allocating 2000 bytes for weights")
    text = str(caught.value)
    assert "allocating 2000 bytes for weights" in text
    assert "CUDA_ERROR_OUT_OF_MEMORY (out_of_memory)" in text
    assert "--memory" in text


def test_no_device_is_what_the_driver_says() -> None:
    with pytest.raises(NoDeviceError, match="CUDA_ERROR_NO_DEVICE"):
        open_driver(0, FakeDriver(devices=0))


def test_no_library_is_what_the_bindings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeDriver()
    monkeypatch.setattr(api, "cuInit", _raiser("libcuda.so cannot be found"))
    with pytest.raises(NoDeviceError, match=r"no CUDA driver: libcuda\.so cannot be found"):
        open_driver(0, api)


def test_no_bindings_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "BINDINGS", "cuda.no_such_bindings")
    with pytest.raises(NoDeviceError, match="bindings cannot be imported"):
        open_driver()


def test_a_number_that_no_device_has_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match=r"no CUDA device 2; this machine has 0 … 1"):
        open_driver(2, FakeDriver(devices=2))


def test_a_function_that_the_driver_lacks_asks_for_a_newer_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeDriver()
    driver = open_driver(0, api)
    monkeypatch.setattr(api, "cuFuncLoad", _raiser('Function "cuFuncLoad" not found'))
    with pytest.raises(DeviceError, match=r"not found\nInstall a driver"):
        driver.call("cuFuncLoad", 1, doing="loading")


def test_another_thread_enters_the_context_itself() -> None:
    driver = open_driver(0, FakeDriver())
    results: list[object] = []

    def work() -> None:
        try:
            driver.call("cuMemAlloc", 8, doing="allocating")
        except DeviceError as error:
            results.append("INVALID_CONTEXT" in str(error))
        driver.make_current()
        results.append(driver.call("cuMemAlloc", 8, doing="allocating") is not None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [True, True]


def test_a_sealed_driver_refuses_what_takes_memory() -> None:
    driver = open_driver(0, FakeDriver())
    driver.check_unsealed("loading images")
    driver.seal()
    with pytest.raises(DeviceError, match="loading images after the worker was ready"):
        driver.check_unsealed("loading images")


def test_importing_the_module_is_light() -> None:
    code = (
        "import sys, ouro_build.runtime.driver; print([m for m in ('numpy', 'msgspec', 'cuda.bindings') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
