"""What a build was asked for of sparse decoding, validated, and what that comes to for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from ouro_build.artifacts.errors import BudgetError, UsageError
from ouro_build.artifacts.geometry import SPARSE_MODES
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.references import slot_arithmetic, slot_bytes
from ouro_build.artifacts.retention import retained_counts

MAX_REFERENCE_SLOTS = 1 << 20
DENSE = SPARSE_MODES[0]


class SparseGeometry(TypedDict):
    """The fields of a `Geometry` that are about sparse decoding."""

    sparse_modes: tuple[str, ...]
    key_retention: float
    key_capacity: int
    reference_slots: int


@dataclass(frozen=True)
class SparseSpec:
    """The flags. None stands for what is not given.

    `modes` of `recurrent`, in any order; `key_retention` in (0, 1]; `key_bucket` keys a slot has room for; `reference_memory`
    bytes that all slots may take.
    """

    modes: tuple[str, ...] = (DENSE,)
    key_retention: float | None = None
    key_bucket: int | None = None
    reference_slots: int | None = None
    reference_memory: int | None = None

    def __post_init__(self) -> None:
        _check_modes(self.modes)
        given = {
            "--key-retention": self.key_retention,
            "--key-bucket": self.key_bucket,
            "--reference-slots": self.reference_slots,
            "--reference-memory": self.reference_memory,
        }
        if not self.sparse:
            flag = next((name for name, value in given.items() if value is not None), None)
            if flag is not None:
                hint = f"Give --sparse-modes {','.join(SPARSE_MODES)}, or leave {flag} out."
                raise UsageError("it is about sparse modes, and none is to be built", where=flag, hint=hint)
            return
        if self.key_retention is None:
            hint = "Give the share of keys to retain, for example --key-retention 0.1"
            raise UsageError("sparse modes need it", where="--key-retention", hint=hint)
        if not 0 < self.key_retention <= 1:
            raise UsageError(f"{self.key_retention} is outside 0 … 1, 0 excluded", where="--key-retention")
        for flag in ("--key-bucket", "--reference-slots", "--reference-memory"):
            value = given[flag]
            if value is not None and value < 1:
                raise UsageError(f"{value} is less than 1", where=flag)
        if self.reference_slots is not None and self.reference_slots > MAX_REFERENCE_SLOTS:
            raise UsageError(f"{self.reference_slots} is more than {MAX_REFERENCE_SLOTS}", where="--reference-slots")

    @property
    def sparse(self) -> bool:
        """Whether any mode but dense is to be built."""
        return len(self.modes) > 1

    def geometry(self, model: ModelConfig, max_context: int, max_requests: int) -> SparseGeometry:
        """The fields for `model`. Raises UsageError for too long a context or too small a key bucket, BudgetError for
        too little memory.

        Without a number of slots there is one a request, or as many as the memory given holds. With all keys retained rows
        remember nothing, and there are none.
        """
        retention = 1.0 if self.key_retention is None else self.key_retention
        modes = tuple(mode for mode in SPARSE_MODES if mode in self.modes)
        if not self.sparse or retention == 1:
            return SparseGeometry(sparse_modes=modes, key_retention=retention, key_capacity=0, reference_slots=0)
        capacity = self._capacity(max_context, retention)
        slots = self._slots(model, capacity, max_requests)
        return SparseGeometry(sparse_modes=modes, key_retention=retention, key_capacity=capacity, reference_slots=slots)

    def _capacity(self, max_context: int, retention: float) -> int:
        most = int(retained_counts(max_context, retention)[-1])
        if self.key_bucket is None:
            return most
        if self.key_bucket < most:
            raise UsageError(
                f"{self.key_bucket} keys are too few: {most} of {max_context} are retained at --key-retention {retention}",
                where="--key-bucket",
                hint=f"Give {most} or more, or lower --max-context or --key-retention; without the flag it is {most}.",
            )
        return self.key_bucket

    def _slots(self, model: ModelConfig, capacity: int, max_requests: int) -> int:
        one, memory = slot_bytes(model, capacity), self.reference_memory
        if memory is None:
            return max_requests if self.reference_slots is None else self.reference_slots
        slots = memory // one if self.reference_slots is None else self.reference_slots
        if not 0 < slots * one <= memory:
            raise BudgetError(
                f"{slot_arithmetic(model, capacity, max(slots, 1))}, {memory:,} are given",
                where="--reference-memory",
                hint="Raise --reference-memory, or lower --reference-slots, --max-context or --key-retention.",
            )
        return min(slots, MAX_REFERENCE_SLOTS)


def parse_modes(text: str) -> tuple[str, ...]:
    """Modes from `dense,capture`. Raises UsageError for what is no mode."""
    modes = tuple(item.strip() for item in text.split(","))
    _check_modes(modes)
    return modes


def _check_modes(modes: Sequence[str]) -> None:
    where, known = "--sparse-modes", ",".join(SPARSE_MODES)
    for mode in modes:
        if mode not in SPARSE_MODES:
            raise UsageError(f"{mode!r} is not one of {known}", where=where, hint=f"Write it like {where} {known}")
        if modes.count(mode) > 1:
            raise UsageError(f"{mode} is given twice", where=where)
    if DENSE not in modes:
        what = f"{DENSE} is missing: prompts, and loops before the source loop, run by it"
        raise UsageError(what, where=where, hint=f"Write it like {where} {known}")
