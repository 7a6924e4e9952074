import hashlib
from pathlib import Path

import msgspec
import pytest

from ouro_build.artifacts import digests
from ouro_build.artifacts.digests import chunk_count, digest_files, verify_files
from ouro_build.artifacts.errors import ArtifactError


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK", 16)
    monkeypatch.setattr(digests, "CHUNKED_ABOVE", 64)
    monkeypatch.setattr(digests, "_READ", 10)


@pytest.mark.usefixtures("small_chunks")
def test_sizes_around_the_chunk_limits(tmp_path: Path) -> None:
    for size in (0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 200):
        data = bytes(i % 251 for i in range(size))
        (tmp_path / "f").write_bytes(data)
        (record,) = digest_files(tmp_path, ["f"], 3)
        expected = [hashlib.sha256(data[i : i + 16]).hexdigest() for i in range(0, size, 16)] if size > 64 else []
        assert (record.bytes, record.sha256, list(record.chunks)) == (size, hashlib.sha256(data).hexdigest(), expected)
        assert len(record.chunks) == chunk_count(size)
        verify_files(tmp_path, [record])


@pytest.mark.usefixtures("small_chunks")
def test_damage_names_file_and_bytes(tmp_path: Path) -> None:
    data = bytearray(100)
    (tmp_path / "f").write_bytes(data)
    (record,) = digest_files(tmp_path, ["f"])
    data[40] = 1
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"f: sha256 of bytes 32 … 48 is"):
        verify_files(tmp_path, [record])


@pytest.mark.usefixtures("small_chunks")
def test_each_digest_of_a_record_is_checked(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    (record,) = digest_files(tmp_path, ["f"])
    with pytest.raises(ArtifactError, match="f: sha256 is"):
        verify_files(tmp_path, [msgspec.structs.replace(record, sha256="0" * 64)])
    with pytest.raises(ArtifactError, match="6 chunk digests, 7 expected"):
        verify_files(tmp_path, [msgspec.structs.replace(record, chunks=record.chunks[:-1])])


def test_missing_and_resized_files(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    (record,) = digest_files(tmp_path, ["f"])
    (tmp_path / "f").write_bytes(b"abcd")
    with pytest.raises(ArtifactError, match="4 bytes, 3 expected"):
        verify_files(tmp_path, [record])
    (tmp_path / "f").unlink()
    with pytest.raises(ArtifactError, match="f: cannot be read: No such file"):
        verify_files(tmp_path, [record])
