"""What the rows of a made-up state have to do with the reference pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.rows import Mode, Row
from ouro_build.runtime.memory import Memory

_REMEMBERED = ("reference_records", "reference_mass", "reference_keys", "reference_output", "reference_contribution")


@dataclass(frozen=True)
class RowReferences:
    """Per live row int64 columns: its mode, reference slot and generation."""

    mode: NDArray[np.int64]
    slot: NDArray[np.int64]
    generation: NDArray[np.int64]

    def enter(self, state: NDArray[np.int32], slots: Sequence[int]) -> None:
        """Put them into the row states of `slots`."""
        for column, values in ((Row.MODE, self.mode), (Row.REFERENCE_SLOT, self.slot), (Row.GENERATION, self.generation)):
            state[slots, column] = values


def room(key: ProgramKey, geometry: Geometry) -> int:
    """Live rows of a program that there are references for: all, unless every row has to consume one."""
    return geometry.reference_slots if key.mode == "consume" and geometry.references else geometry.max_rows


def row_references(rng: np.random.Generator, geometry: Geometry, count: int) -> RowReferences:
    """Random modes, a slot of its own for each of the first rows, none for the others, which are dense."""
    bound = min(count, geometry.reference_slots)
    slot = np.full(count, geometry.padding_slot)
    slot[:bound] = rng.permutation(geometry.reference_slots)[:bound]
    mode = np.where(np.arange(count) < bound, rng.integers(0, len(Mode), count), Mode.DENSE)
    return RowReferences(mode, slot, rng.integers(0, 1 << 30, count))


def write_references(
    memory: Memory,
    buffers: Mapping[str, Buffer],
    model: ModelConfig,
    geometry: Geometry,
    rows: RowReferences,
    positions: NDArray[np.int64],
    rng: np.random.Generator,
) -> None:
    """The table of counts, and random contents of the rows' slots, all of them captured; what is beyond stays poisoned.

    Keys are random positions of the row's context, as many as the table says.
    """
    counts = retained_counts(geometry.max_context, geometry.key_retention)
    memory.write(Pool.REFERENCES, buffers["retained_counts"].offset, counts)
    heads = (model.layers, model.heads)
    for slot, generation, position in zip(rows.slot.tolist(), rows.generation.tolist(), positions.tolist(), strict=True):
        if slot == geometry.padding_slot:
            continue
        n = position + 1
        count = int(counts[n])
        keys = np.full((*heads, geometry.key_capacity), -1, np.int32)
        keys[..., :count] = np.sort(rng.random((*heads, n)).argsort(-1)[..., :count], -1)
        contents = {
            "reference_records": np.tile(np.array([generation, count], np.int32), (model.layers, 1)),
            "reference_mass": rng.random(heads, np.float32),
            "reference_keys": keys,
            "reference_output": rng.standard_normal((*heads, model.head_dim), np.float32),
            "reference_contribution": rng.standard_normal((*heads, model.head_dim), np.float32),
        }
        for name in _REMEMBERED:
            memory.write(Pool.REFERENCES, buffers[name].offset + slot * contents[name].nbytes, contents[name])
