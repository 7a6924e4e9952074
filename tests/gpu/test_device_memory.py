import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.manifest import FileRecord
from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.runtime import upload, weights_file
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.machine import describe, probe
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.snapshots import HostSnapshot, TorchSnapshot
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.upload import FileUpload
from ouro_build.runtime.weights_file import WeightsFile
from tests.gpu.alone import ALONE

MACHINE = probe()
pytestmark = pytest.mark.skipif(bool(MACHINE.reason), reason=f"no CUDA device: {MACHINE.reason}")
MIB = 1 << 20
LARGE = 5 << 30


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = open_driver()
    yield driver
    driver.close()


@pytest.fixture
def memory(driver: Driver) -> Iterator[DeviceMemory]:
    memory = DeviceMemory(driver, {Pool.WEIGHTS: 40 * MIB, Pool.IO: 1000})
    yield memory
    memory.close()


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def test_the_machine_is_described(driver: Driver) -> None:
    machine = describe(driver)
    assert machine.name
    assert machine.capability >= (7, 0)
    assert machine.sm_count > 0
    assert 0 < machine.memory_free <= machine.memory_total
    assert machine.cuda is not None
    assert machine.cuda >= (12, 4)


@pytest.mark.parametrize("size", [1, 1000, 4 * MIB, 17 * MIB + 13])
def test_what_is_written_is_read_back(memory: DeviceMemory, size: int) -> None:
    data = random_bytes(size)
    memory.write(Pool.WEIGHTS, 3, data)
    assert (memory.read(Pool.WEIGHTS, 3, size) == data).all()


def test_work_is_in_order_and_data_may_be_reused(memory: DeviceMemory) -> None:
    data = np.empty(MIB, np.uint8)
    for turn in range(60):  # fifteen times round the ring
        data[:] = turn
        memory.fill(Pool.WEIGHTS, 0xFF)
        memory.write(Pool.WEIGHTS, turn % 40 * MIB, data)
    out = memory.read(Pool.WEIGHTS, 0, 40 * MIB).reshape(40, MIB)
    assert (out[19] == 59).all()
    assert (np.delete(out, 19, axis=0) == 0xFF).all()


def test_later_reads_are_in_order_whenever_they_are_taken(memory: DeviceMemory) -> None:
    reads = []
    for turn in range(30):  # seven times round the ring
        memory.fill(Pool.IO, turn)
        reads.append(memory.read_later(Pool.IO, 0, 1000))
    memory.fill(Pool.IO, 0xFF)
    for turn in reversed(range(30)):
        assert (reads[turn].result() == turn).all()


def test_a_pool_beyond_four_gib(driver: Driver) -> None:
    if describe(driver).memory_free < LARGE + (1 << 30):
        pytest.skip(f"needs {LARGE} bytes of free device memory")
    memory = DeviceMemory(driver, {Pool.KV: LARGE})
    memory.fill(Pool.KV, 0x11)
    memory.write(Pool.KV, LARGE - 8, np.arange(8, dtype=np.uint8))
    assert memory.read(Pool.KV, LARGE - 10, 10).tolist() == [0x11, 0x11, *range(8)]
    assert memory.read(Pool.KV, 0, 8).tolist() == [0x11] * 8
    memory.close()


@ALONE
def test_nothing_is_allocated_by_use(driver: Driver, memory: DeviceMemory) -> None:
    memory.seal()
    memory.write(Pool.WEIGHTS, 0, random_bytes(MIB))
    memory.synchronize()
    before = describe(driver).memory_free
    for _ in range(50):
        memory.write(Pool.WEIGHTS, 0, random_bytes(MIB))
        memory.read(Pool.WEIGHTS, 0, 8 * MIB)
        memory.read_later(Pool.WEIGHTS, 0, 8 * MIB)
        memory.fill(Pool.IO, 1)
    assert describe(driver).memory_free == before


@ALONE
def test_closing_gives_the_memory_back(driver: Driver) -> None:
    DeviceMemory(driver, {Pool.KV: MIB}).close()
    before = describe(driver).memory_free
    memory = DeviceMemory(driver, {Pool.KV: 512 * MIB})
    assert before - describe(driver).memory_free >= 512 * MIB
    memory.close()
    assert describe(driver).memory_free == before


def test_torch_sees_the_same_bytes(memory: DeviceMemory) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    data = random_bytes(1000)
    memory.write(Pool.IO, 0, data)
    memory.synchronize()

    class View:
        __cuda_array_interface__ = {  # noqa: RUF012 - the protocol wants a plain dict
            "shape": (1000,),
            "typestr": "|u1",
            "data": (memory.base(Pool.IO), False),
            "version": 3,
        }

    view = torch.as_tensor(View(), device="cuda:0")
    assert (view.cpu().numpy() == data).all()
    view.fill_(9)
    torch.cuda.synchronize()
    assert (memory.read(Pool.IO, 0, 1000) == 9).all()


@pytest.mark.parametrize("way", ["any", "staged"])
@pytest.mark.parametrize("check", [True, False])
def test_a_file_fills_the_pool(
    memory: DeviceMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, check: bool
) -> None:
    chunk = MIB
    monkeypatch.setattr(weights_file, "CHUNK", chunk)
    if way == "staged":
        monkeypatch.setattr(upload, "_able", lambda _: False)
    content = random_bytes(4096 + 39 * MIB + 77).tobytes()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    digests = tuple(hashlib.sha256(content[s : s + chunk]).hexdigest() for s in range(0, len(content), chunk))
    record = FileRecord(path=path.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), chunks=digests)
    going = FileUpload(WeightsFile(path, 4096, record, check=check), StartupClock(), "")
    going.lock(memory.driver)
    going.copy(memory)
    assert going.finish() == len(content) - 4096
    going.close()
    assert memory.read(Pool.WEIGHTS, 0, len(content) - 4096).tobytes() == content[4096:]


@pytest.mark.parametrize("nbytes", [1001, 16 * 65537])
def test_a_pool_is_filled_with_copies_of_its_start_but_for_lines_filled_otherwise(memory: DeviceMemory, nbytes: int) -> None:
    held = []
    for made in (memory, HostMemory({Pool.WEIGHTS: 40 * MIB})):
        made.write(Pool.WEIGHTS, 0, random_bytes(nbytes))
        made.repeat(Pool.WEIGHTS, nbytes)
        for lines in ((3, 5 * MIB + 7, 1234, 8), (30 * MIB, 9 * MIB, 9 * MIB, 1), (100, 256, 240, 96)):
            made.fill_lines(Pool.WEIGHTS, *lines, 0xFF)
        held.append(made.read(Pool.WEIGHTS, 0, 40 * MIB))
    assert np.array_equal(held[0], held[1])


@pytest.mark.parametrize("room", [True, False])
def test_snapshots_see_a_bit_and_the_lines_that_were_written(
    driver: Driver, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 20, 1 << 30))
    memory = DeviceMemory(driver, {Pool.KV: 40 * MIB, Pool.IO: 1000})
    wide = Buffer("wide", Pool.KV, "float32", (10 * MIB // 16, 16), 0)
    before, after, host = TorchSnapshot(memory), TorchSnapshot(memory), HostSnapshot(memory)
    for pool in (Pool.KV, Pool.IO):
        memory.fill(pool, 1)
    before.take()
    assert {t.is_cuda for t in before._kept.values()} == {room}
    memory.write(Pool.KV, 64 * 1000, np.full(65, 2, np.uint8))
    after.take()
    host.take()
    assert [snapshot.same() for snapshot in (before, after, host)] == [False, True, True]
    memory.write(Pool.KV, 40 * MIB - 1, np.full(1, 3, np.uint8))
    assert [snapshot.same() for snapshot in (before, after, host)] == [False, False, False]
    written = before.differing(wide)
    assert written.nonzero().squeeze(1).tolist() == [1000, 1001, 10 * MIB // 16 - 1]
    got, now, _ = after.lines(wide, written)
    assert got.shape == now.shape == (3, 64)
    assert (got[:, 0].tolist(), now[:, -1].tolist()) == ([2, 2, 1], [2, 1, 3])
    memory.close()
