"""Packed weights as a stream: into a pool, into a file, or only into digests. At most some pieces are in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError, CheckpointError
from ouro_build.artifacts.lanes import Lanes, ordered_map, thread_count
from ouro_build.artifacts.manifest import CHUNK, CHUNKED_ABOVE, WEIGHTS, FileRecord, TensorRecord, WeightsRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import LAYOUT, PackedTensor, WeightSource, inv_freq, pool_bytes, weight_layout
from ouro_build.artifacts.safetensors_file import file_header

PIECE = 1 << 20
"""Elements of a piece, at most; but a matrix comes in whole bands, at least one."""
_BACKLOG = 32


class Piece(NamedTuple):
    """Consecutive bytes (uint8) of a packed tensor, the first of them `start` bytes into it."""

    tensor: PackedTensor
    start: int
    data: NDArray[np.uint8]


def pack(source: WeightSource, model: ModelConfig) -> Iterator[Piece]:
    """Every packed tensor of `model`, in load order, in pieces; several threads read and convert ahead."""
    frequencies = inv_freq(model)

    def read(job: tuple[PackedTensor, int]) -> Piece:
        tensor, start = job
        stop = min(start + _step(tensor), tensor.elements)
        values = source.read(tensor, start, stop) if tensor.sources else frequencies[start:stop]
        return Piece(tensor, start * values.itemsize, np.ascontiguousarray(values).view(np.uint8))

    jobs = ((tensor, start) for tensor in weight_layout(model) for start in range(0, tensor.elements, _step(tensor)))
    return ordered_map(read, jobs, 2 * thread_count())


def _step(tensor: PackedTensor) -> int:
    return max(PIECE // tensor.band, 1) * tensor.band


def load_packed(
    source: WeightSource, model: ModelConfig, record: WeightsRecord | None = None
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(offset in the weights pool, bytes) of every piece of the packed weights, in order.

    With `record` the tensors are hashed meanwhile, and CheckpointError is raised, at the latest after the last piece, if
    one is not what the record says; ArtifactError at once if the record is not of this model's layout.
    """
    if record is None:
        return ((piece.tensor.offset + piece.start, piece.data) for piece in pack(source, model))
    check_layout(record, model)
    return _load_checked(source, model, record)


def check_layout(record: WeightsRecord, model: ModelConfig, where: str = "weights") -> None:
    """Raise ArtifactError unless `record` lists exactly the packed tensors of `model`, where this software puts them."""
    if record.layout != LAYOUT:
        raise ArtifactError(f"layout {record.layout!r} is not known, only {LAYOUT!r}", where=where)
    wanted = tuple(_described(tensor) for tensor in weight_layout(model))
    found = tuple((t.name, t.dtype, t.shape, t.offset, t.bytes, t.sources) for t in record.tensors)
    if found != wanted or record.bytes != pool_bytes(model):
        raise ArtifactError(f"the tensors are not those of layout {LAYOUT} for this model", where=where)


def write_weights(source: WeightSource, model: ModelConfig, out: BinaryIO | None) -> WeightsRecord:
    """Write the packed weights file of `model` to `out`, or with None only find its digests; one pass either way.

    `out` needs `write` only and is not closed; what it raises passes through.
    """
    whole, chunks, tensors = hashlib.sha256(), _Chunks(), _TensorHashes(model)
    size = 0
    with Lanes(3, _BACKLOG) as lanes:
        for tensor, data in _file_pieces(source, model):
            lanes.put(0, partial(whole.update, data))
            lanes.put(1, partial(chunks.update, data))
            if tensor is not None:
                lanes.put(2, partial(tensors.update, tensor, data))
            if out is not None:
                out.write(data)
            size += len(data)
        lanes.wait()
    digests = tuple(chunks.digests()) if size > CHUNKED_ABOVE else ()
    return WeightsRecord(
        embedded=out is not None,
        layout=LAYOUT,
        bytes=pool_bytes(model),
        tensors=tensors.records(),
        file=FileRecord(path=WEIGHTS, bytes=size, sha256=whole.hexdigest(), chunks=digests),
    )


def _file_pieces(source: WeightSource, model: ModelConfig) -> Iterator[tuple[PackedTensor | None, memoryview]]:
    """The file from its first byte to its last; header and fillers belong to no tensor."""
    layout, size = weight_layout(model), pool_bytes(model)
    yield None, memoryview(file_header(layout, size, {"layout": LAYOUT}))
    at = 0
    for tensor, start, data in pack(source, model):
        if tensor.offset + start > at:
            yield None, memoryview(bytes(tensor.offset + start - at))
        yield tensor, data.data
        at = tensor.offset + start + len(data)
    if size > at:
        yield None, memoryview(bytes(size - at))


def _load_checked(source: WeightSource, model: ModelConfig, record: WeightsRecord) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    hashes = _TensorHashes(model)
    lane = {tensor.name: at for at, tensor in enumerate(weight_layout(model))}
    with Lanes(thread_count(), _BACKLOG) as lanes:
        for tensor, start, data in pack(source, model):
            lanes.put(lane[tensor.name], partial(hashes.update, tensor, data.data))
            yield tensor.offset + start, data
        lanes.wait()
    for wanted, found in zip(record.tensors, hashes.records(), strict=True):
        if found.sha256 != wanted.sha256:
            raise CheckpointError(
                f"{wanted.name} (from {', '.join(wanted.sources) or 'the configuration'}) has sha256 {found.sha256}, "
                f"the artifact was built with {wanted.sha256}",
                where=source.label,
                hint="Give the weights that the artifact was built from with --weights, or build it again from these.",
            )


class _TensorHashes:
    """sha256 of every packed tensor. A tensor's bytes must come in order; different tensors may come side by side."""

    def __init__(self, model: ModelConfig) -> None:
        self._layout = weight_layout(model)
        self._hashes = {tensor.name: hashlib.sha256() for tensor in self._layout}

    def update(self, tensor: PackedTensor, data: memoryview) -> None:
        self._hashes[tensor.name].update(data)

    def records(self) -> tuple[TensorRecord, ...]:
        return tuple(_record(tensor, self._hashes[tensor.name].hexdigest()) for tensor in self._layout)


class _Chunks:
    """sha256 of every CHUNK bytes of a stream."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash = hashlib.sha256()
        self._room = CHUNK

    def update(self, data: memoryview) -> None:
        while len(data) >= self._room:
            self._hash.update(data[: self._room])
            data = data[self._room :]
            self._done.append(self._hash.hexdigest())
            self._hash, self._room = hashlib.sha256(), CHUNK
        self._hash.update(data)
        self._room -= len(data)

    def digests(self) -> list[str]:
        return [*self._done, self._hash.hexdigest()] if self._room < CHUNK else self._done


def _described(tensor: PackedTensor) -> tuple[object, ...]:
    sources = tuple(source.name for source in tensor.sources)
    return tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes, sources


def _record(tensor: PackedTensor, sha256: str) -> TensorRecord:
    return TensorRecord(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        offset=tensor.offset,
        bytes=tensor.bytes,
        sha256=sha256,
        sources=tuple(source.name for source in tensor.sources),
    )
