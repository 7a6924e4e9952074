import hashlib
import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import ArtifactError, DeviceError
from ouro_build.artifacts.manifest import FileRecord
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime import locked_pages, weights_file
from ouro_build.runtime.chunk_hashes import ChunkHashes
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.upload import FileUpload, upload_pieces
from ouro_build.runtime.weights_file import WeightsFile
from tests.unit.runtime.fake_driver import FakeDriver

CHUNK, DATA, SIZE = 8192, 4096, 100_000
WAYS = pytest.mark.parametrize("register", [True, False], ids=["mapped", "staged"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "CHUNK", CHUNK)


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(1).integers(0, 256, DATA + SIZE, np.uint8).tobytes()


def record(content: bytes, chunked: bool = True) -> FileRecord:
    starts = range(0, len(content), CHUNK) if chunked else ()
    chunks = tuple(hashlib.sha256(content[s : s + CHUNK]).hexdigest() for s in starts)
    return FileRecord(path="weights.safetensors", bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), chunks=chunks)


def opened(register: bool, size: int = SIZE) -> tuple[FakeDriver, DeviceMemory]:
    api = FakeDriver(register=register)
    return api, DeviceMemory(open_driver(0, api), {Pool.WEIGHTS: size})


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    return path


def upload_file(memory: DeviceMemory, path: Path, data: int, record: FileRecord, check: bool = True) -> int:
    """The whole way of a file, as a worker takes it."""
    upload = FileUpload(WeightsFile(path, data, record, check=check), StartupClock(0.0), "")
    try:
        upload.lock(memory.driver)
        upload.copy(memory)
        return upload.finish()
    finally:
        upload.close()


@WAYS
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_file_fills_the_pool(tmp_path: Path, content: bytes, register: bool, check: bool, chunked: bool) -> None:
    api, memory = opened(register)
    before = api.live()
    path = written(tmp_path, content)
    assert upload_file(memory, path, DATA, record(content, chunked), check=check) == SIZE
    assert memory.read(Pool.WEIGHTS, 0, SIZE).tobytes() == content[DATA:]
    assert api.live() == before
    assert api.calls["cuMemHostRegister"] == register


@WAYS
@pytest.mark.parametrize("at", [0, DATA - 1, DATA, CHUNK, DATA + SIZE - 1])
def test_one_wrong_bit_names_the_file_and_the_chunk(tmp_path: Path, content: bytes, register: bool, at: int) -> None:
    api, memory = opened(register)
    before = api.live()
    damaged = bytearray(content)
    damaged[at] ^= 1
    with pytest.raises(ArtifactError, match=rf"weights.safetensors: chunk {at // CHUNK} \(bytes"):
        upload_file(memory, written(tmp_path, bytes(damaged)), DATA, record(content))
    assert api.live() == before
    memory.synchronize()  # no copy is left that would read what was given back


@WAYS
def test_a_wrong_bit_of_a_file_with_one_digest_is_found(tmp_path: Path, content: bytes, register: bool) -> None:
    _, memory = opened(register)
    with pytest.raises(ArtifactError, match="chunk 0"):
        upload_file(memory, written(tmp_path, content[:-1] + b"?"), DATA, record(content, chunked=False))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_size_is_refused_before_anything_is_copied(tmp_path: Path, content: bytes, change: int) -> None:
    api, memory = opened(register=True)
    with pytest.raises(ArtifactError, match=f"{DATA + SIZE + change} bytes, the manifest says {DATA + SIZE}"):
        upload_file(memory, written(tmp_path, (content + b"x")[: DATA + SIZE + change]), DATA, record(content))
    assert api.calls["cuMemcpyHtoDAsync"] == 0


def test_wrong_chunk_digests_are_refused(tmp_path: Path, content: bytes) -> None:
    _, memory = opened(register=True)
    whole = record(content)
    fewer = FileRecord(path=whole.path, bytes=whole.bytes, sha256=whole.sha256, chunks=whole.chunks[:-1])
    with pytest.raises(ArtifactError, match="12 chunk digests, 13 expected"):
        upload_file(memory, written(tmp_path, content), DATA, fewer)


def test_more_data_than_the_pool_is_refused(tmp_path: Path, content: bytes) -> None:
    _, memory = opened(register=True, size=SIZE - 1)
    with pytest.raises(DeviceError, match="weights"):
        upload_file(memory, written(tmp_path, content), DATA, record(content))


def test_pages_are_locked_and_copied_piece_by_piece(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_pages, "PIECE", 2 * mmap.PAGESIZE)
    api, memory = opened(register=True)
    before = api.live()
    assert upload_file(memory, written(tmp_path, content), DATA, record(content)) == SIZE
    assert memory.read(Pool.WEIGHTS, 0, SIZE).tobytes() == content[DATA:]
    assert api.live() == before
    count = -(-(DATA + SIZE) // (2 * mmap.PAGESIZE))
    assert count > 2
    assert api.calls["cuMemHostRegister"] == api.calls["cuMemHostUnregister"] == count


def test_a_piece_that_cannot_be_locked_gives_the_others_back() -> None:
    held: set[int] = set()

    def lock(address: int, size: int) -> bool:
        if len(held) == 2:
            return False
        held.add(address)
        return True

    pages = locked_pages.LockedPages(lock, held.remove)
    assert not pages.lock(4096, 3 * locked_pages.PIECE)
    assert not held
    assert pages.lock(4096, 2 * locked_pages.PIECE)
    seen: list[int] = []
    pages.unlock(lambda: seen.append(len(held)))
    assert seen == [1, 0]


def test_pages_that_cannot_be_locked_are_staged(tmp_path: Path, content: bytes) -> None:
    api, memory = opened(register=True)
    api.fail("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
    assert upload_file(memory, written(tmp_path, content), DATA, record(content)) == SIZE
    assert memory.read(Pool.WEIGHTS, 0, SIZE).tobytes() == content[DATA:]


def test_a_file_that_cannot_be_mapped_is_staged(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no mapping here")

    _, memory = opened(register=True)
    monkeypatch.setattr("ouro_build.runtime.chunk_hashes.mmap.mmap", refuse)
    assert upload_file(memory, written(tmp_path, content), DATA, record(content)) == SIZE
    assert memory.read(Pool.WEIGHTS, 0, SIZE).tobytes() == content[DATA:]


def test_a_damaged_file_that_cannot_be_mapped_is_found_on_the_way(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no mapping here")

    _, memory = opened(register=True)
    monkeypatch.setattr("ouro_build.runtime.chunk_hashes.mmap.mmap", refuse)
    with pytest.raises(ArtifactError, match=r"weights.safetensors: chunk 12 \(bytes"):
        upload_file(memory, written(tmp_path, content[:-1] + b"?"), DATA, record(content))


@pytest.mark.parametrize("at", [None, 0, DATA + SIZE - 1])
def test_a_file_that_was_hashed_before_it_was_known_is_compared(tmp_path: Path, content: bytes, at: int | None) -> None:
    found = bytearray(content)
    if at is not None:
        found[at] ^= 1
    path = written(tmp_path, bytes(found))
    hashes = ChunkHashes(str(path), CHUNK)
    hashes.wait()
    _, memory = opened(register=True)
    upload = FileUpload(WeightsFile(path, DATA, record(content), check=True, hashes=hashes), StartupClock(0.0), "")
    upload.copy(memory)
    if at is None:
        assert upload.finish() == SIZE
    else:
        with pytest.raises(ArtifactError, match=f"chunk {at // CHUNK} "):
            upload.finish()
    upload.close()
    assert hashes.pages is None


@pytest.mark.parametrize(("chunk", "check"), [(CHUNK // 2, True), (CHUNK, False)])
def test_hashes_of_other_chunks_or_of_none_do_not_count(tmp_path: Path, content: bytes, chunk: int, check: bool) -> None:
    path = written(tmp_path, content[:-1] + b"?")
    hashes = ChunkHashes(str(path), chunk, check=check)
    file = WeightsFile(path, DATA, record(content), check=True, hashes=hashes)
    with pytest.raises(ArtifactError, match="chunk 12"):
        file.wait()
    file.close()


@given(st.binary(max_size=300), st.integers(1, 100), st.booleans())
def test_every_chunk_has_its_digest(content: bytes, chunk: int, check: bool) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder), content)
        hashes = ChunkHashes(str(path), chunk, check=check)
        parts = [content[at : at + chunk] for at in range(0, len(content), chunk)]
        assert hashes.wait() == [hashlib.sha256(part).hexdigest() if check else "" for part in parts]
        hashes.close()
        hashes.close()


def test_chunks_are_those_of_manifests_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    hashes = ChunkHashes(str(path), check=False)
    assert (hashes.chunk, len(hashes.wait())) == (16 << 20, 5)
    hashes.close()
    path.write_bytes(b"small")
    hashes = ChunkHashes(str(path))
    assert (hashes.chunk, len(hashes.wait())) == (5, 1)
    hashes.close()


def test_chunks_are_checked_before_there_is_a_device(tmp_path: Path, content: bytes) -> None:
    file = WeightsFile(written(tmp_path, content[:-1] + b"?"), DATA, record(content), check=True)
    with pytest.raises(ArtifactError, match="chunk 12"):
        file.wait()
    file.close()


def test_an_unchecked_file_is_taken_as_it_is(tmp_path: Path, content: bytes) -> None:
    _, memory = opened(register=True)
    found = content[:-1] + b"?"
    assert upload_file(memory, written(tmp_path, found), DATA, record(content), check=False) == SIZE
    assert memory.read(Pool.WEIGHTS, 0, SIZE).tobytes() == found[DATA:]


@WAYS
def test_phases_beside_say_what_was_moved(tmp_path: Path, content: bytes, register: bool) -> None:
    _, memory = opened(register)
    clock = StartupClock(0.0)
    with clock.phase("load"):
        upload = FileUpload(WeightsFile(written(tmp_path, content), DATA, record(content), check=True), clock, "load")
        upload.lock(memory.driver)
        upload.copy(memory)
        upload.finish()
    upload.close()
    found = {p.name: p for p in clock.record().phases if p.beside}
    assert {(n, p.parent, p.bytes) for n, p in found.items()} == {
        ("lock pages", "load", SIZE if register else 0),
        ("copy weights", "load", SIZE),
        ("release pages", "load", 0),
    }
    assert found["copy weights"].rate is not None


@WAYS
def test_a_failed_copy_is_a_device_error(tmp_path: Path, content: bytes, register: bool) -> None:
    api, memory = opened(register)
    before = api.live()
    api.fail("cuMemcpyHtoDAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceError, match="copying the weights to the device"):
        upload_file(memory, written(tmp_path, content), DATA, record(content))
    assert api.live() == before


@WAYS
@pytest.mark.parametrize("damaged", [False, True])
def test_the_first_failure_is_told_whatever_fails_after_it(
    tmp_path: Path, content: bytes, register: bool, damaged: bool
) -> None:
    api, memory = opened(register)
    before = api.live()
    api.fail("cuStreamSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
    if not damaged:
        api.fail("cuMemcpyHtoDAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")
    found = content[:-1] + b"?" if damaged else content
    what = "chunk 12" if damaged else "copying the weights to the device: CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(ArtifactError if damaged else DeviceError, match=what):
        upload_file(memory, written(tmp_path, found), DATA, record(content))
    assert api.live() == before


@WAYS
def test_a_copy_that_fails_while_it_runs_is_a_device_error(tmp_path: Path, content: bytes, register: bool) -> None:
    api, memory = opened(register)
    before = api.live()
    api.fail("cuStreamSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(DeviceError, match="copying the weights to the device: CUDA_ERROR_LAUNCH_FAILED"):
        upload_file(memory, written(tmp_path, content), DATA, record(content))
    assert api.live() == before


def test_pieces_go_where_they_belong() -> None:
    _, memory = opened(register=True)
    memory.fill(Pool.WEIGHTS, 0)
    pieces: list[tuple[int, NDArray[Any]]] = [(4096, np.arange(10, dtype=np.uint16)), (0, np.full((3, 3), 7, np.float32))]
    assert upload_pieces(memory, iter(pieces)) == 20 + 36
    assert (memory.read(Pool.WEIGHTS, 4096, 20).view(np.uint16) == np.arange(10)).all()
    assert (memory.read(Pool.WEIGHTS, 0, 36).view(np.float32) == 7).all()
