"""Pools in memory that someone else owns: used, checked, never given back by the worker."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime import opening, worker
from ouro_build.runtime.dlpack import CUDA
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.given_memory import GivenMemory, needed_bytes
from tests.artifact_maker import BLOCK_BYTES, GIB, KV_BLOCKS, make_artifact
from tests.unit.runtime.fake_driver import FakeDriver, cubin

SIZES = {Pool.WEIGHTS: 4096, Pool.KV: 1024, Pool.STATE: 256}


@pytest.fixture
def api() -> FakeDriver:
    return FakeDriver(memory=4 * GIB)


@pytest.fixture
def driver(api: FakeDriver) -> Driver:
    return open_driver(0, api)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given") / "a.ouro"
    return make_artifact(path, ("h200",), embedded=True, cubin=lambda image: cubin(image.function, image.parameters))


def allocate(api: FakeDriver, size: int) -> int:
    return int(api.cuMemAlloc(size)[1])


class Tensor:
    """One of another library, on a CUDA device."""

    def __init__(self, address: int, size: int, device: int = 0, kind: int = CUDA) -> None:
        self._array = np.zeros(size, np.uint8)
        self._address, self._device, self._kind = address, device, kind
        self.exports = 0

    def __dlpack__(self, **options: Any) -> Any:
        self.exports += 1
        capsule = self._array.__dlpack__()
        pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        # Its first fields: void *data; int32 device type, device id.
        at = pointer(capsule, b"dltensor")
        ctypes.c_uint64.from_address(at).value = self._address
        ctypes.c_int32.from_address(at + 8).value = self._kind
        ctypes.c_int32.from_address(at + 12).value = self._device
        return capsule

    @property
    def held(self) -> bool:
        return sys.getrefcount(self._array) > 2


def test_addresses_of_pointers_and_tensors(api: FakeDriver, driver: Driver) -> None:
    weights, kv = allocate(api, 4096), allocate(api, 2048)
    tensor = Tensor(kv, 2048)
    given = GivenMemory({"weights": (weights, 4096), Pool.KV: tensor})
    assert tensor.held
    assert (bool(given), given.bytes) == (True, 6144)
    assert given.addresses(driver, SIZES) == {Pool.WEIGHTS: weights, Pool.KV: kv}
    assert api.calls["cuCtxSynchronize"] == 1
    given.release()
    assert not tensor.held


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"heap": (512, 1)}, "there is no pool 'heap'"),
        ({"kv": (512,)}, r"kv: \(512,\) is not \(address, bytes\)"),
        ({"kv": (512, -1)}, r"is not \(address, bytes\)"),
        ({"kv": "memory"}, "kv: str is no memory"),
        ({"kv": (512, 1), Pool.KV: (512, 1)}, "kv: it is given twice"),
    ],
)
def test_what_is_no_memory_is_refused(given: dict[Any, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        GivenMemory(given)


def test_tensors_are_let_go_if_another_is_refused() -> None:
    tensor = Tensor(1 << 40, 64)
    with pytest.raises(UsageError):
        GivenMemory({"kv": tensor, "weights": None})
    assert tensor.exports == 1
    assert not tensor.held


def test_memory_that_cannot_be_the_pool_is_refused(api: FakeDriver, driver: Driver) -> None:
    at = allocate(api, 8192)

    def refused(what: str, **given: object) -> None:
        pools: dict[Pool | str, object] = dict(given.items())
        memory = GivenMemory(pools)
        with pytest.raises(UsageError, match=what):
            memory.addresses(driver, SIZES)
        memory.release()

    refused("pools: kv: 1000 bytes are given, 1024 are needed", kv=(at, 1000))
    refused("pools: kv: address .* is not a multiple of 256", kv=(at + 16, 2048))
    refused("pools: kv: address .* is no memory that CUDA knows", kv=(at + 8192 - 512, 1024))
    refused("pools: kv: it is on DLPack device 2:1, 2:0 is needed", kv=Tensor(at, 1024, device=1))
    refused("pools: kv: it is on DLPack device 1:0, 2:0 is needed", kv=np.zeros(1024, np.uint8))
    refused("pools: kv: it overlaps the pool weights", weights=(at, 4096), kv=(at + 3840, 1024))
    api.owner = 1
    refused("is memory of type 2 on device 1, type 2 on device 0 is needed", kv=(at, 1024))


def test_needed_bytes_are_those_of_the_plan(artifact: Path) -> None:
    needed = needed_bytes(artifact)
    assert needed == {
        Pool.WEIGHTS: needed[Pool.WEIGHTS], Pool.KV: KV_BLOCKS * BLOCK_BYTES, Pool.WORKSPACE: 512, Pool.IO: 512,
    }  # fmt: skip
    assert needed_bytes(artifact, "h200", 5)[Pool.KV] == 5 * BLOCK_BYTES
    with pytest.raises(UsageError, match="was built for h200"):
        needed_bytes(artifact, "rtx-5090")


@pytest.fixture
def loading(api: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(opening, "open_driver", lambda device: open_driver(device, api))
    monkeypatch.setattr(worker, "Steps", lambda *_, **__: None)
    return api


def test_a_worker_in_memory_that_it_does_not_own(artifact: Path, loading: FakeDriver) -> None:
    api, other = loading, open_driver(0, loading)
    needed = needed_bytes(artifact)
    weights, kv = allocate(api, needed[Pool.WEIGHTS]), allocate(api, needed[Pool.KV])
    tensor = Tensor(kv, needed[Pool.KV])
    before = dict(api.allocations)
    with worker.load(artifact, pools={"weights": (weights, needed[Pool.WEIGHTS]), "kv": tensor}) as loaded:
        assert (loaded.memory.base(Pool.WEIGHTS), loaded.memory.base(Pool.KV)) == (weights, kv)
        assert len(api.allocations) == len(before) + 2, "workspace and io are its own"
        stored = (artifact / "weights.safetensors").read_bytes()[-needed[Pool.WEIGHTS] :]
        assert loaded.memory.read(Pool.WEIGHTS, 0, needed[Pool.WEIGHTS]).tobytes() == stored
        assert loaded.notes == ()
        assert tensor.held
    assert not tensor.held
    assert dict(api.allocations).keys() == before.keys()
    other.close()


def test_a_given_kv_pool_decides_how_many_blocks_there_are(artifact: Path, loading: FakeDriver) -> None:
    other = open_driver(0, loading)
    kv = allocate(loading, 6 * BLOCK_BYTES)
    with worker.load(artifact, pools={"kv": (kv, 6 * BLOCK_BYTES - 1)}) as loaded:
        assert loaded.path.kv_blocks == 5
        assert loaded.memory.size(Pool.KV) == 5 * BLOCK_BYTES
    with pytest.raises(UsageError, match=rf"{BLOCK_BYTES} bytes are given, {4 * BLOCK_BYTES} are needed for one request"):
        worker.load(artifact, pools={"kv": (kv, BLOCK_BYTES)})
    other.close()
    assert loading.live() == {"device memory": 1}


def test_memory_of_a_device_is_of_no_use_without_one(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "open_driver", lambda device: open_driver(device, FakeDriver(devices=0)))
    tensor = Tensor(1 << 40, 64)
    with pytest.raises(UsageError, match="device memory is given, and the worker would run on the host"):
        worker.load(artifact, pools={"kv": tensor})
    assert not tensor.held
