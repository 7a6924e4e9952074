"""CUDA's start beside the opening of an artifact: on a thread of its own, for the thread that waits, and never left behind."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import ArtifactError, DeviceError, NoDeviceError, OuroError, UsageError
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import Artifact, Verify, open_artifact
from ouro_build.runtime import opening, worker
from ouro_build.runtime.chunk_hashes import ChunkHashes
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.locked_pages import PIECE, LockedPages
from ouro_build.runtime.opening import HeldContext, OpeningDriver, hold_context
from ouro_build.runtime.start import Start
from ouro_build.runtime.startup import StartupClock
from tests.artifact_maker import GIB, make_artifact
from tests.unit.runtime.fake_driver import FakeDriver, Pinned, cubin


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


class Library:
    """libcuda, as far as a context is held with it. `fails` is the function that returns an error."""

    def __init__(self, fails: str) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_: object) -> int:
            self.calls.append(name)
            return 100 if name == self._fails else 0

        return call


@pytest.mark.parametrize("fails", ["", "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "library"])
def test_the_context_is_made_before_the_bindings_are_there(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    library = Library(fails)

    def found(name: str) -> Library:
        if fails == "library":
            raise OSError("no such file")
        assert name == "libcuda.so.1"
        return library

    monkeypatch.setattr("ctypes.CDLL", found)
    made = [] if fails == "library" else ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    made = made[: made.index(fails) + 1] if fails in made else made
    given_back = ["cuDevicePrimaryCtxRelease_v2"] if fails in ("", "cuCtxSetCurrent") else []
    early = given_back if fails else []
    held: list[list[str]] = []
    api = FakeDriver()
    use(monkeypatch, api, lambda: held.append(list(library.calls)))
    started = OpeningDriver(0, StartupClock(0.0), early=True)
    started.result()
    started.close()
    assert held == [made + early], "all of it before the driver is opened the ordinary way"
    assert library.calls == made + given_back
    assert api.live() == {}


@pytest.mark.parametrize("fails", ["", "cuMemHostRegister_v2"])
def test_a_files_pages_are_locked_as_soon_as_there_is_a_context(
    artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    library = Library(fails)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(worker, "Steps", lambda *_, **__: None)
    clock, go = StartupClock(0.0), threading.Event()
    hashes = ChunkHashes(str(artifact / "weights.safetensors"))

    def held(device: int) -> HeldContext | None:
        go.wait(10)  # as a context takes longer than beginning to hash
        return hold_context(device)

    monkeypatch.setattr(opening, "hold_context", held)
    started = OpeningDriver(0, clock, early=True)
    started.file = hashes
    go.set()
    started.result()
    assert (hashes.locked is None) == bool(fails)  # by now it is known
    (lock,) = [p for p in clock.record().phases if p.name == "lock pages"]
    assert (lock.beside, lock.bytes) == (True, 0 if fails else hashes.size)
    address, size = hashes.address, hashes.size
    if not fails:  # the fake knows them as locked, as the driver would
        api.objects[address] = Pinned(address, size, None)
    with worker.load(artifact, start=Start(clock, started, hashes)) as loaded:
        total = loaded.artifact.manifest.weights.bytes
        stored = (artifact / "weights.safetensors").read_bytes()[-total:]
        assert loaded.memory.read(Pool.WEIGHTS, 0, total).tobytes() == stored
        assert api.calls["cuMemHostRegister"] == bool(fails), "once, by whoever comes first"
    assert library.calls.count("cuMemHostUnregister") == (not fails)
    assert hashes.address == 0
    api.objects.pop(address, None)
    assert api.live() == {}


def test_what_no_worker_took_over_is_given_back_in_order(
    artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library("")
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    hashes = ChunkHashes(str(artifact / "weights.safetensors"))
    go = threading.Event()
    use(monkeypatch, api, lambda: go.wait(10))
    started = OpeningDriver(0, StartupClock(0.0), early=True)
    pages = LockedPages(lambda *_: True, lambda _: library.calls.append(f"unlocked with {api.live()}"))
    assert pages.lock(hashes.address, hashes.size)
    hashes.locked = pages
    threading.Timer(0.02, go.set).start()
    Start(StartupClock(0.0), started, hashes).close()
    assert library.calls[-1] == "unlocked with {'context': 1}", "after the device was open, before its context goes"
    assert api.live() == {}


def slow_lock(monkeypatch: pytest.MonkeyPatch, began: threading.Event, go: threading.Event) -> Library:
    """A libcuda whose locking takes until `go`."""

    class Slow(Library):
        def __getattr__(self, name: str) -> Callable[..., int]:
            call = super().__getattr__(name)
            if name != "cuMemHostRegister_v2":
                return call

            def locking(*arguments: object) -> int:
                began.set()
                assert go.wait(10)
                return call(*arguments)

            return locking

    library = Slow("")
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    return library


def test_pages_that_are_still_being_locked_are_unlocked_before_the_context_goes(
    artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another device is asked for in the end: the file stays open, to be locked for that one."""
    began, go, hold = threading.Event(), threading.Event(), threading.Event()
    library = slow_lock(monkeypatch, began, go)
    hashes = ChunkHashes(str(artifact / "weights.safetensors"))

    def held(device: int) -> HeldContext | None:
        hold.wait(10)
        return hold_context(device)

    monkeypatch.setattr(opening, "hold_context", held)
    started = OpeningDriver(0, StartupClock(0.0), early=True)
    started.file = hashes
    hold.set()
    started.result()
    assert began.wait(10), "the driver is open while pages are being locked"
    threading.Timer(0.02, go.set).start()
    started.close()
    assert api.live() == {}
    assert library.calls[-1] == "cuMemHostUnregister"
    assert hashes.locked is None
    assert hashes.pages is not None
    hashes.close()


def test_a_file_that_was_let_go_is_locked_no_more(artifact: Path) -> None:
    hashes = ChunkHashes(str(artifact / "weights.safetensors"))
    began, go = threading.Event(), threading.Event()
    unlocked: list[int] = []

    def lock() -> LockedPages:
        began.set()
        assert go.wait(10)
        pages = LockedPages(lambda *_: True, unlocked.append)
        pages.lock(hashes.address, hashes.size)
        return pages

    hashes.lock_beside(lock)
    assert began.wait(10)
    threading.Timer(0.02, go.set).start()
    hashes.close()
    assert len(unlocked) == 1
    hashes.lock_beside(lambda: pytest.fail("the file is not there any more"))
    assert hashes.locked is None


def test_locking_that_fails_leaves_nothing_locked(artifact: Path) -> None:
    hashes = ChunkHashes(str(artifact / "weights.safetensors"))
    held: list[int] = []

    def lock(address: int, size: int) -> bool:
        if held:
            raise RuntimeError("no more")
        held.append(address)
        return True

    pages = LockedPages(lock, held.remove)
    with pytest.raises(RuntimeError, match="no more"):
        pages.lock(4096, 2 * PIECE)
    assert held == []

    def fails() -> LockedPages:
        pages.lock(4096, 2 * PIECE)
        return pages

    hashes.lock_beside(fails)
    assert hashes.locked is None
    assert held == []
    hashes.close()


def test_the_address_of_a_mapped_file(artifact: Path) -> None:
    hashes = ChunkHashes(str(artifact / "weights.safetensors"))
    assert hashes.pages is not None
    view = np.frombuffer(hashes.pages, np.uint8)
    assert hashes.address == view.ctypes.data
    del view
    hashes.close()


def test_a_worker_takes_over_the_device_that_is_opening_if_it_is_the_one(
    artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "Steps", lambda *_, **__: None)
    api.devices = 2
    for device, opened in ((0, 1), (1, 2)):
        before = api.calls["cuInit"]
        started = OpeningDriver(0, StartupClock(0.0))
        worker.load(artifact, device=device, start=Start(StartupClock(0.0), started)).close()
        assert api.calls["cuInit"] == before + opened
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


def test_weights_that_are_being_hashed_are_taken_over_if_they_are_the_artifacts(
    artifact: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "Steps", lambda *_, **__: None)
    own, other = artifact / "weights.safetensors", tmp_path / "other"
    other.write_bytes(b"what the manifest knows nothing of")
    for path, checked in ((own, set()), (other, {"check weights"})):
        start = Start(StartupClock(0.0), None, ChunkHashes(str(path)))
        with worker.load(artifact, start=start) as loaded:
            names = {p.name for p in loaded.startup().phases}
            assert names & {"check weights"} == checked
        assert start.hashes is not None
        assert start.hashes.descriptor == -1
        assert api.live() == {}
    damaged = tmp_path / "a.ouro"
    shutil.copytree(artifact, damaged)
    content = (damaged / "weights.safetensors").read_bytes()
    (damaged / "weights.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="chunk 0"):
        worker.load(damaged, start=Start(StartupClock(0.0), None, ChunkHashes(str(damaged / "weights.safetensors"))))
    assert api.live() == {}
