import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime.device_memory import BANK, BANKS, DeviceMemory
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.memory import ALIGNMENT, HostMemory
from tests.unit.runtime.fake_driver import FakeDriver

SIZES = {Pool.WEIGHTS: 1000, Pool.KV: 300, Pool.STATE: 0}


def opened(api: FakeDriver, bank: int = BANK, banks: int = BANKS) -> DeviceMemory:
    return DeviceMemory(open_driver(0, api), SIZES, bank=bank, banks=banks)


def test_pools_are_allocated_once_and_given_back() -> None:
    api = FakeDriver()
    memory = opened(api)
    assert api.calls["cuMemAlloc"] == 2
    assert memory.allocated == 1300
    assert memory.base(Pool.WEIGHTS) % ALIGNMENT == 0
    assert memory.base(Pool.STATE) == memory.base(Pool.IO) == 0
    assert memory.size(Pool.STATE) == memory.size(Pool.IO) == 0
    memory.close()
    memory.close()
    assert api.live() == {"context": 1}
    assert memory.size(Pool.WEIGHTS) == 0


@pytest.mark.parametrize("nbytes", [1, 7, 128, 299, 300])
def test_a_pool_is_filled_with_copies_of_its_start(nbytes: int) -> None:
    pattern = np.random.default_rng(nbytes).integers(256, size=nbytes, dtype=np.uint8)
    for memory in (opened(FakeDriver()), HostMemory(SIZES)):
        memory.write(Pool.KV, 0, pattern)
        memory.repeat(Pool.KV, nbytes)
        assert np.array_equal(memory.read(Pool.KV, 0, 300), np.resize(pattern, 300))
        with pytest.raises(DeviceError, match="access to bytes 0 … 301"):
            memory.repeat(Pool.KV, 301)


@pytest.mark.parametrize(
    ("offset", "pitch", "width", "lines"), [(0, 1, 1, 300), (5, 70, 20, 4), (280, 20, 20, 1), (3, 9, 9, 33)]
)
def test_lines_are_filled_and_nothing_else(offset: int, pitch: int, width: int, lines: int) -> None:
    want = np.zeros(300, np.uint8)
    for line in range(lines):
        want[offset + line * pitch : offset + line * pitch + width] = 0xFF
    for memory in (opened(FakeDriver()), HostMemory(SIZES)):
        memory.fill(Pool.KV, 0)
        memory.fill_lines(Pool.KV, offset, pitch, width, lines, 0xFF)
        assert np.array_equal(memory.read(Pool.KV, 0, 300), want)
        with pytest.raises(DeviceError, match="access to bytes"):
            memory.fill_lines(Pool.KV, 300 - width + 1, pitch, width, 1, 0xFF)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("cuStreamCreate", 1),
        ("cuMemAlloc", 1),
        ("cuMemAlloc", 2),
        ("cuMemHostAlloc", 1),
        ("cuMemHostAlloc", 2),
        ("cuEventCreate", 3),
        ("cuEventCreate", 6),
    ],
)
def test_a_failure_gives_everything_back(name: str, at: int) -> None:
    api = FakeDriver()
    driver = open_driver(0, api)
    api.fail(name, "CUDA_ERROR_OUT_OF_MEMORY", at)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        DeviceMemory(driver, SIZES)
    assert api.live() == {"context": 1}


def test_too_large_a_pool_is_named() -> None:
    driver = open_driver(0, FakeDriver(memory=1 << 20))
    with pytest.raises(DeviceError, match="allocating 2097152 bytes for the pool kv: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory(driver, {Pool.WEIGHTS: 1000, Pool.KV: 2 << 20})


def test_what_is_written_is_read_back() -> None:
    memory = opened(FakeDriver())
    data = np.arange(100, dtype=np.int16).reshape(10, 10)
    memory.write(Pool.WEIGHTS, 512, data)
    memory.write(Pool.WEIGHTS, 512, data[:1, :2].T)
    assert (memory.read(Pool.WEIGHTS, 512, 200).view(np.int16) == data.reshape(-1)).all()


def test_data_may_be_reused_at_once() -> None:
    memory = opened(FakeDriver())
    data = np.full(100, 1, np.uint8)
    for value in range(1, 4):
        data[:] = value
        memory.write(Pool.WEIGHTS, 100 * value, data)
        data[:] = 99
    assert memory.read(Pool.WEIGHTS, 100, 300).reshape(3, 100).tolist() == [[v] * 100 for v in (1, 2, 3)]


@settings(max_examples=60)
@given(
    bank=st.integers(1, 64),
    banks=st.integers(1, 4),
    writes=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 200)), max_size=12),
)
def test_any_ring_gives_the_same_bytes(bank: int, banks: int, writes: list[tuple[int, int]]) -> None:
    memory = opened(FakeDriver(), bank=bank, banks=banks)
    memory.fill(Pool.WEIGHTS, 0)
    expected = np.zeros(1000, np.uint8)
    for i, (offset, size) in enumerate(writes):
        data = (np.arange(min(size, 1000 - offset)) + i).astype(np.uint8)
        memory.write(Pool.WEIGHTS, offset, data)
        expected[offset : offset + len(data)] = data
    assert (memory.read(Pool.WEIGHTS, 0, 1000) == expected).all()


def test_small_writes_share_a_bank_and_do_not_wait() -> None:
    api = FakeDriver()
    memory = opened(api, bank=1024, banks=2)
    for _ in range(30):
        memory.write(Pool.KV, 0, np.zeros(64, np.uint8))
    assert api.calls["cuEventSynchronize"] == 0
    memory.write(Pool.WEIGHTS, 0, np.zeros(1000, np.uint8))
    assert api.calls["cuEventSynchronize"] == 1


def test_fill_sets_every_byte_after_earlier_work() -> None:
    memory = opened(FakeDriver())
    memory.write(Pool.KV, 0, np.zeros(300, np.uint8))
    memory.fill(Pool.KV, 0xFF)
    memory.fill(Pool.STATE, 0xFF)
    assert (memory.read(Pool.KV, 0, 300) == 0xFF).all()


def test_a_later_read_sees_what_was_there_when_it_was_submitted() -> None:
    memory = opened(FakeDriver())
    reads = []
    for value in range(3):
        memory.fill(Pool.KV, value)
        reads.append(memory.read_later(Pool.KV, 10 * value, 5))
    memory.fill(Pool.KV, 99)
    for value in (2, 0, 1, 1):
        assert reads[value].result().tolist() == [value] * 5


def test_a_later_read_waits_for_its_own_work_alone() -> None:
    api = FakeDriver()
    memory = opened(api)
    memory.fill(Pool.KV, 1)
    read = memory.read_later(Pool.KV, 0, 300)
    memory.fill(Pool.KV, 2)
    assert (api.view(memory.base(Pool.KV), 300) == 0xA5).all()
    assert (read.result() == 1).all()
    assert (api.view(memory.base(Pool.KV), 300) == 1).all()
    assert api.calls["cuStreamSynchronize"] == 0


@settings(max_examples=60)
@given(
    bank=st.integers(1, 64),
    banks=st.integers(1, 4),
    ranges=st.lists(st.tuples(st.integers(0, 299), st.integers(0, 100), st.booleans()), max_size=12),
)
def test_any_ring_brings_every_read_back(bank: int, banks: int, ranges: list[tuple[int, int, bool]]) -> None:
    """However many are under way, and in whatever order they are asked for."""
    memory = opened(FakeDriver(), bank=bank, banks=banks)
    waiting = []
    for i, (offset, size, now) in enumerate(ranges):
        memory.fill(Pool.KV, i)
        size = min(size, 300 - offset)
        read = memory.read_later(Pool.KV, offset, size)
        waiting.append((i, size, read))
        if now:
            assert read.result().tolist() == [i] * size
    memory.fill(Pool.KV, 0xFF)
    for i, size, read in reversed(waiting):
        assert read.result().tolist() == [i] * size


def test_only_a_full_ring_makes_a_later_read_wait() -> None:
    api = FakeDriver()
    memory = opened(api, bank=64, banks=3)
    reads = [memory.read_later(Pool.KV, 0, 64) for _ in range(3)]
    assert api.calls["cuEventSynchronize"] == 0
    memory.read_later(Pool.KV, 0, 64)
    assert api.calls["cuEventSynchronize"] == 1
    reads[0].result()
    assert api.calls["cuEventSynchronize"] == 1


def test_a_failed_later_read_says_so_to_whoever_waits() -> None:
    api = FakeDriver()
    memory = opened(api, bank=64, banks=1)
    api.fail("cuMemcpyDtoHAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="copying 64 bytes to the host: CUDA_ERROR_ILLEGAL_ADDRESS"):
        memory.read_later(Pool.KV, 0, 64)
    read = memory.read_later(Pool.KV, 0, 64)
    for call in (read.result, read.result, lambda: memory.read_later(Pool.KV, 0, 8), lambda: memory.read(Pool.KV, 0, 8)):
        api.fail("cuEventSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
        with pytest.raises(DeviceError, match="waiting for 64 bytes from the device: CUDA_ERROR_LAUNCH_FAILED"):
            call()


def test_a_read_that_was_not_waited_for_in_time_is_lost() -> None:
    memory = opened(FakeDriver())
    memory.fill(Pool.KV, 7)
    taken, lost = (memory.read_later(Pool.KV, 0, 4) for _ in range(2))
    taken.result()
    memory.close()
    assert taken.result().tolist() == [7] * 4
    with pytest.raises(DeviceError, match="given back before this read was waited for"):
        lost.result()


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (298, 4), (301, 0), (0, 301)])
def test_access_outside_a_pool_is_refused(offset: int, size: int) -> None:
    memory = opened(FakeDriver())
    with pytest.raises(DeviceError, match="kv"):
        memory.read(Pool.KV, offset, size)
    with pytest.raises(DeviceError, match="kv"):
        memory.read_later(Pool.KV, offset, size)
    with pytest.raises(DeviceError, match="kv"):
        memory.write(Pool.KV, offset, np.zeros(size, np.uint8))


def test_a_failed_copy_says_so() -> None:
    api = FakeDriver()
    memory = opened(api)
    api.fail("cuMemcpyHtoDAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="copying 8 bytes to the device: CUDA_ERROR_ILLEGAL_ADDRESS"):
        memory.write(Pool.KV, 0, np.zeros(8, np.uint8))
    api.fail("cuStreamSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceError, match="waiting for the device"):
        memory.synchronize()


def test_nothing_is_allocated_once_sealed() -> None:
    api = FakeDriver()
    memory = opened(api)
    memory.seal()
    before = dict(api.calls)
    memory.write(Pool.WEIGHTS, 0, np.zeros(900, np.uint8))
    memory.read(Pool.WEIGHTS, 0, 900)
    memory.read_later(Pool.WEIGHTS, 0, 900)
    assert api.calls["cuMemAlloc"] == before["cuMemAlloc"]
    assert api.calls["cuMemHostAlloc"] == before["cuMemHostAlloc"]
    with pytest.raises(DeviceError, match="allocating 1000 bytes for the pool weights after the worker was ready"):
        DeviceMemory(memory.driver, SIZES)
