"""Safetensors files: a strict reader over the mapped file, and the header of the files that we write.

Layout: u64 length of the header, the header (a JSON object), the data. The library is not used: it cannot give bfloat16
to numpy, and it orders tensors its own way when it writes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import CheckpointError, OuroError
from ouro_build.artifacts.strict_json import parse_object

DATA_ALIGNMENT = 4096
"""Data of the files that we write starts at a multiple of a page, so that it can be mapped and registered."""
FILLER = "_fill."
"""Names of the tensors that stand for alignment gaps begin with this: the format allows no holes."""

_MAX_HEADER = 100_000_000  # the library's own limit
_MAX_RANK = 32  # numpy 1.26's own limit
_METADATA = "__metadata__"
_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}
_OURS = {name: dtype for dtype, name in _NAMES.items()}
_OTHER_WIDTHS = {1: "BOOL I8 F8_E4M3 F8_E5M2 F8_E8M0", 2: "I16 U16", 4: "U32", 8: "U64 F64 C64"}
_WIDTHS = {name: DTYPES[dtype].bytes for dtype, name in _NAMES.items()}
_WIDTHS |= {name: width for width, names in _OTHER_WIDTHS.items() for name in names.split()}


class Entry(NamedTuple):
    """A tensor: element type (our name, or the format's where we have none), shape, bytes [start, stop) of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """A file, mapped read-only, whose header has been checked completely: offsets in range, without overlap or hole.

    `entries` are in the order of their data; `data` is everything after the header, uint8. Raises `damaged`
    (CheckpointError unless told otherwise), naming file and tensor, for anything amiss.
    """

    def __init__(self, path: Path, damaged: type[OuroError] = CheckpointError) -> None:
        self.path = path
        self._damaged = damaged
        raw = self._map()
        self.data_start, header = self._header(raw)
        self.data = raw[self.data_start :]
        self.metadata = self._metadata(header.pop(_METADATA, {}))
        self.entries = self._entries(header)

    def array(self, name: str) -> NDArray[np.generic]:
        """All elements of a tensor in one dimension, read-only, in the storage type of its dtype; pages are read when used."""
        entry = self.entries[name]
        return self.data[entry.start : entry.stop].view(DTYPES[entry.dtype].storage)

    def error(self, what: str, tensor: str = "") -> OuroError:
        """An error about this file, and one of its tensors where given."""
        return self._damaged(what, where=f"{self.path}: {tensor}" if tensor else str(self.path))

    def _map(self) -> NDArray[np.uint8]:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise self.error(f"{size} bytes: not a safetensors file")
                return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from error

    def _header(self, raw: NDArray[np.uint8]) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(raw[:8].tobytes(), "little")
        if length > _MAX_HEADER or (len(raw) > 8 and raw[8] != ord("{")):
            raise self.error("not a safetensors file")
        if 8 + length > len(raw):
            raise self.error(f"truncated: the header needs {8 + length} bytes, the file has {len(raw)}")
        header = parse_object(raw[8 : 8 + length].tobytes(), f"{self.path}: header", self._damaged)
        return 8 + length, header

    def _metadata(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self.error("texts by name are expected", _METADATA)
        return value

    def _entries(self, header: dict[str, Any]) -> dict[str, Entry]:
        entries = {name: self._entry(name, value) for name, value in header.items()}
        ordered = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
        at = 0
        for name, entry in ordered.items():
            if entry.start != at:
                what = "overlaps the tensor before it" if entry.start < at else "leaves a hole before it"
                raise self.error(f"data_offsets {entry.start} … {entry.stop}: {what}, which ends at {at}", name)
            at = entry.stop
        if at != len(self.data):
            what = "truncated" if at > len(self.data) else "not a whole safetensors file"
            raise self.error(f"{what}: the tensors need {at} bytes of data, the file has {len(self.data)}")
        return ordered

    def _entry(self, name: str, value: object) -> Entry:
        try:
            stored = msgspec.convert(value, _Stored)
        except msgspec.ValidationError as error:
            raise self.error(str(error), name) from error
        width = _WIDTHS.get(stored.dtype)
        if width is None:
            raise self.error(f"unknown dtype {stored.dtype!r}", name)
        # Sizes of 0 must not hide others that numpy cannot hold.
        if len(stored.shape) > _MAX_RANK or min(stored.shape, default=0) < 0 or math.prod(s or 1 for s in stored.shape) >> 60:
            raise self.error(f"impossible shape {list(stored.shape)}", name)
        start, stop = stored.data_offsets
        if start < 0 or stop - start != width * math.prod(stored.shape):
            raise self.error(f"data_offsets {start} … {stop} do not fit {stored.dtype} {list(stored.shape)}", name)
        return Entry(_OURS.get(stored.dtype, stored.dtype), stored.shape, start, stop)


class Placed(Protocol):
    """A tensor to be written, at `offset` bytes of the data."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def dtype(self) -> str:
        """Its element type, one of `dtypes.DTYPES`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def offset(self) -> int:
        """Where its data begin."""

    @property
    def bytes(self) -> int:
        """Bytes of its data."""


def file_header(tensors: Iterable[Placed], size: int, metadata: Mapping[str, str]) -> bytes:
    """Everything before the data of a file of `tensors`, ascending by offset, and `size` bytes of data.

    Gaps between tensors, and after the last, become uint8 tensors named `_fill.N`; their data must be zeros. Spaces make
    the data start at a multiple of DATA_ALIGNMENT. The same arguments give the same bytes.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)}
    at = 0

    def fill(stop: int) -> None:
        if stop > at:
            header[f"{FILLER}{len(header)}"] = {"dtype": "U8", "shape": [stop - at], "data_offsets": [at, stop]}

    for tensor in tensors:
        fill(tensor.offset)
        at = tensor.offset + tensor.bytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, at],
        }
    fill(size)
    text = msgspec.json.encode(header)
    length = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8
    return length.to_bytes(8, "little") + text.ljust(length)
