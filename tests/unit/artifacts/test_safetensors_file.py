"""The strict reader against damage of every kind, and the header that we write against the library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ouro_build.artifacts.errors import ArtifactError, CheckpointError
from ouro_build.artifacts.packing import PackedTensor
from ouro_build.artifacts.safetensors_file import DATA_ALIGNMENT, FILLER, SafetensorsFile, file_header
from tests.unit.artifacts.checkpoints import GOLDEN

TENSORS: dict[str, NDArray[Any]] = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.int64),
    "c": np.zeros((0, 3), np.float16),
    "d": np.array(7, np.uint8),
}
FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def stored(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(raw)
    return path


def tensor(start: int, stop: int, shape: Any, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "np"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "np"}
    assert file.entries.keys() == TENSORS.keys()
    for name, values in TENSORS.items():
        assert file.entries[name].shape == values.shape
        np.testing.assert_array_equal(file.array(name), values.reshape(-1))
        assert not file.array(name).flags.writeable


def test_bfloat16_is_read_as_its_bits() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    path = GOLDEN / "mha-bf16" / "model.safetensors"
    file = SafetensorsFile(path)
    for name, values in load_torch(path).items():
        assert file.entries[name].dtype == "bfloat16"
        assert np.array_equal(file.array(name), values.reshape(-1).view(torch.uint16).numpy())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "0 bytes: not a safetensors file"),
        (b"1234567", "7 bytes: not a safetensors file"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
        (struct.pack("<Q", 10) + b"\x80\x02" + bytes(20), "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "truncated: the header needs 108 bytes, the file has 10"),
        (stored(b"{]"), "not valid JSON"),
        (stored(b'{"a": ' * 20_000), "not valid JSON"),
        (stored(b'{"a": {}, "a": {}}'), "key 'a' is repeated"),
        (stored({"a": 5}), "a: Expected"),
        (stored({"a": {}}), "a: Object missing required field"),
        (stored({"a": {**tensor(0, 1, [1]), "x": 1}}, b"1"), "a: Object contains unknown field"),
        (stored({"a": tensor(0, 1, [1], "F7")}, b"1"), "a: unknown dtype 'F7'"),
        (stored({"a": tensor(0, 1, [True])}, b"1"), "a: Expected `int`"),
        (stored({"a": tensor(0, 1, [-1])}, b"1"), "a: impossible shape"),
        (stored({"a": tensor(0, 0, [0, 1 << 40, 1 << 40])}), "a: impossible shape"),
        (stored({"a": tensor(0, 1, [1] * 40)}, b"1"), "a: impossible shape"),
        (stored({"a": tensor(0, 1 << 80, [1 << 80])}), "a: "),
        (stored({"a": tensor(0, 2, [1])}, b"12"), "a: data_offsets 0 … 2 do not fit U8"),
        (stored({"a": tensor(-1, 0, [1])}, b"1"), "a: data_offsets -1"),
        (stored({"a": tensor(2, 1, [1])}, b"12"), "a: data_offsets 2"),
        (stored({"a": tensor(0, 2, [2]), "b": tensor(1, 3, [2])}, b"123"), "b: data_offsets 1 … 3: overlaps"),
        (stored({"a": tensor(0, 1, [1]), "b": tensor(2, 3, [1])}, b"123"), "b: data_offsets 2 … 3: leaves a hole"),
        (stored({"a": tensor(0, 9, [9])}, b"123"), "truncated: the tensors need 9 bytes of data, the file has 3"),
        (stored({"a": tensor(0, 1, [1])}, b"123"), "not a whole safetensors file"),
        (stored({"__metadata__": {"a": 1}}), "__metadata__: texts by name"),
        (stored({"__metadata__": []}), "__metadata__: texts by name"),
    ],
)
def test_damage_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    path = write(tmp_path, raw)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_unreadable_files_and_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: No such file"):
        SafetensorsFile(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)
    with pytest.raises(ArtifactError, match=r"not a safetensors file"):
        SafetensorsFile(write(tmp_path, b"x"), ArtifactError)


SOUND = stored({"a": tensor(0, 6, [2, 3]), "b": tensor(6, 14, [2], "F32"), "__metadata__": {"format": "pt"}}, bytes(14))


@given(st.integers(0, len(SOUND) - 1))
@FOLDER
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(CheckpointError):
        SafetensorsFile(write(tmp_path, SOUND[:size]))


@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 15), st.integers(0, 255)), min_size=1, max_size=4))
@FOLDER
def test_a_damaged_header_is_refused_or_still_sound(tmp_path: Path, damage: list[tuple[int, int]]) -> None:
    raw = bytearray(SOUND)
    for at, value in damage:
        raw[at] = value
    try:
        file = SafetensorsFile(write(tmp_path, bytes(raw)))
    except CheckpointError:
        return
    assert sum(entry.stop - entry.start for entry in file.entries.values()) == len(file.data)
    for name, entry in file.entries.items():
        assert 0 <= entry.start <= entry.stop <= len(file.data)
        if entry.dtype in ("float32", "uint8"):
            assert file.array(name).reshape(entry.shape).nbytes == entry.stop - entry.start


@given(st.dictionaries(st.text(max_size=3), st.fixed_dictionaries({
    "dtype": st.sampled_from(["U8", "F32", "BF16", "Q4"]),
    "shape": st.lists(st.integers(-1, 3), max_size=3),
    "data_offsets": st.lists(st.integers(-2, 20), min_size=2, max_size=2),
}), max_size=3), st.integers(0, 20))  # fmt: skip
@FOLDER
def test_any_header_is_refused_or_covers_the_data(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    try:
        file = SafetensorsFile(write(tmp_path, stored(header, bytes(size))))
    except CheckpointError:
        return
    covered = [at for entry in file.entries.values() for at in range(entry.start, entry.stop)]
    assert sorted(covered) == list(range(size))


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = [
        PackedTensor("first", "float32", (5,), 0, ()),
        PackedTensor("second", "uint8", (256,), 256, ()),
        PackedTensor("last", "int32", (2, 3), 512, ()),
    ]
    data = np.zeros(768, np.uint8)
    data[:20] = np.arange(5, dtype="<f4").view(np.uint8)
    data[256:512] = np.arange(256, dtype=np.uint8)
    data[512:536] = np.arange(6, dtype="<i4").view(np.uint8)
    header = file_header(tensors, 768, {"layout": "test"})
    assert len(header) == DATA_ALIGNMENT
    path = write(tmp_path, header + data.tobytes())
    loaded = load_file(path)
    np.testing.assert_array_equal(loaded["first"], np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(loaded["last"], np.arange(6, dtype=np.int32).reshape(2, 3))
    assert {name for name in loaded if name.startswith(FILLER)} == loaded.keys() - {"first", "second", "last"}
    file = SafetensorsFile(path)
    assert {t.name: file.entries[t.name].start for t in tensors} == {t.name: t.offset for t in tensors}
    assert file.data_start == DATA_ALIGNMENT


def test_a_long_header_takes_more_pages() -> None:
    tensors = [PackedTensor(f"tensor.{i}", "uint8", (256,), 256 * i, ()) for i in range(400)]
    header = file_header(tensors, 256 * 400, {})
    assert len(header) % DATA_ALIGNMENT == 0
    assert len(header) > DATA_ALIGNMENT
