"""CUDA's start beside the opening of an artifact: on a thread of its own, for the thread that waits, and never left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import ArtifactError, DeviceError, NoDeviceError, OuroError, UsageError
from ouro_build.artifacts.reader import Artifact, Verify, open_artifact
from ouro_build.runtime import opening, worker
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.opening import OpeningDriver
from ouro_build.runtime.startup import StartupClock
from tests.artifact_maker import GIB, make_artifact
from tests.unit.runtime.fake_driver import FakeDriver, cubin


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """What workers of this test open."""
    api = FakeDriver(memory=4 * GIB)
    use(monkeypatch, api)
    return api


def use(monkeypatch: pytest.MonkeyPatch, api: FakeDriver, before: Callable[[], object] = lambda: None) -> None:
    def opened(device: int) -> Driver:
        before()
        return open_driver(device, api)

    monkeypatch.setattr(opening, "open_driver", opened)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("opening") / "a.ouro"
    return make_artifact(path, ("h200",), embedded=True, cubin=lambda image: cubin(image.function, image.parameters))


def test_the_driver_opens_beside_and_is_current_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    api, go, threads = FakeDriver(), threading.Event(), []

    def before() -> None:
        threads.append(threading.get_ident())
        go.wait(10)

    use(monkeypatch, api, before)
    clock = StartupClock(0.0)
    with clock.phase("load"):
        started = OpeningDriver(0, clock)
        assert api.calls["cuInit"] == 0
        with clock.phase("open and verify"):
            go.set()
        driver = started.result()
    assert threads != [threading.get_ident()]
    assert driver.call("cuMemGetInfo", doing="asking here") == (api.memory, api.memory)
    found = {p.name: p for p in clock.record().phases}
    assert found["device"].parent == found["open and verify"].parent == "load"
    assert found["device"].start_s <= found["open and verify"].start_s
    started.close()
    started.close()
    assert api.live() == {}


@pytest.mark.parametrize(("devices", "ordinal", "error"), [(0, 0, NoDeviceError), (1, 3, UsageError), (1, 0, DeviceError)])
def test_what_cannot_be_opened_is_raised_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, devices: int, ordinal: int, error: type[OuroError]
) -> None:
    api = FakeDriver(devices=devices)
    if error is DeviceError:
        api.fail("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY")
    use(monkeypatch, api)
    started = OpeningDriver(ordinal, StartupClock(0.0))
    with pytest.raises(error):
        started.result()
    started.close()
    assert api.live() == {}


def test_a_worker_loads_while_cuda_starts(artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA waits here until the artifact is open."""
    verified = threading.Event()

    def noted(path: Path, verify: Verify) -> Artifact:
        found = open_artifact(path, verify)
        verified.set()
        return found

    use(monkeypatch, api, lambda: verified.wait(10))
    monkeypatch.setattr(worker, "open_artifact", noted)
    monkeypatch.setattr(worker, "Steps", lambda *_, **__: None)
    with worker.load(artifact) as loaded:
        assert loaded.executor == "graph"
        phases = {p.name: p for p in loaded.startup().phases}
        assert {p.parent for n, p in phases.items() if n not in ("interpreter and imports", "load")} == {"load"}
        verify, device, wait = (phases[n] for n in ("open and verify", "device", "wait for device"))
        assert device.start_s <= verify.start_s + verify.seconds <= device.start_s + device.seconds
        assert device.start_s + device.seconds <= wait.start_s + wait.seconds + 1e-5
    assert api.live() == {}


def test_a_worker_that_cannot_be_loaded_leaves_no_context(artifact: Path, api: FakeDriver, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such artifact"):
        worker.load(tmp_path / "nothing.ouro")
    with pytest.raises(UsageError, match="1000 is outside 1"):
        worker.load(artifact, max_requests=1000)
    with pytest.raises(ArtifactError, match="buffer coda_batch"):  # its plans are not those of a worker
        worker.load(artifact)
    assert api.calls["cuDevicePrimaryCtxRetain"] == 3
    assert api.live() == {}
