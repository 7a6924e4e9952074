"""What a build was asked for, validated: every value that a flag can have, and none that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.parts import Part, find_part
from ouro_build.artifacts.records import CoverageRecord
from ouro_build.artifacts.tuning import TuningTable
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.tuned import check_tables

MAX_BUCKET = 1024
MAX_PREFILL_BUCKET = 8192
MAX_REQUESTS = 65536
MAX_CONTEXT_DEFAULT = 4096
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class BuildSpec:
    """What to build from `model`. None stands for a default that depends on the model or the part.

    `buckets` and `prefill_buckets` are row counts, ascending; `memory` is bytes that a worker may hold; `tuning` are tables
    that are asked before the shipped ones.
    """

    model: str
    parts: tuple[Part, ...]
    buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...] = (16, 128)
    max_context: int | None = None
    max_requests: int | None = None
    block_size: int = 16
    dtype: str | None = None
    memory: int | None = None
    embed_weights: bool = True
    seed: int = 0
    tuning: tuple[TuningTable, ...] = ()
    sparse: SparseSpec = field(default_factory=SparseSpec)

    def __post_init__(self) -> None:
        if not self.parts:
            raise UsageError("no GPU is named", where="--gpu", hint="Name at least one, for example --gpu sm_90.")
        _check_parts(self.parts)
        check_buckets(self.buckets, "--buckets", MAX_BUCKET)
        check_buckets(self.prefill_buckets, "--prefill-buckets", MAX_PREFILL_BUCKET)
        if self.block_size not in BLOCK_SIZES:
            raise UsageError(f"{self.block_size} is not one of {_listed(BLOCK_SIZES)}", where="--block-size")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"{self.dtype!r} is not one of {_listed(DTYPES)}", where="--dtype")
        _check_range(self.max_context, 2, None, "--max-context")
        _check_range(self.max_requests, 1, MAX_REQUESTS, "--max-requests")
        _check_range(self.memory, 1, None, "--memory")
        _check_range(self.seed, 0, 2**64 - 1, "--seed")
        check_tables(self.tuning, self.parts)

    def geometry(self, model: ModelConfig) -> Geometry:
        """The declared shapes, with defaults that depend on `model` filled in. Raises UsageError or BudgetError."""
        context = min(MAX_CONTEXT_DEFAULT, model.max_position) if self.max_context is None else self.max_context
        if context > model.max_position:
            raise UsageError(f"{context} is more than the model's {model.max_position} positions", where="--max-context")
        requests = self.buckets[-1] if self.max_requests is None else self.max_requests
        return Geometry(
            buckets=self.buckets,
            prefill_buckets=self.prefill_buckets,
            max_context=context,
            max_requests=requests,
            block_size=self.block_size,
            **self.sparse.geometry(model, context, requests),
        )


def find_parts(names: Sequence[str]) -> tuple[Part, ...]:
    """The parts that `--gpu` flags name. Raises UsageError."""
    return tuple(find_part(name) for name in names)


def parse_buckets(text: str, flag: str) -> tuple[int, ...]:
    """Row counts from `1,2,4`. Raises UsageError."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of row counts", where=flag, hint=f"Write it like {flag} 1,2,4,8") from error


def advised_buckets(path: Path) -> tuple[tuple[int, ...], int]:
    """The buckets that the coverage record at `path` advises, as many as it was recorded with, and the most rows of a step.

    Raises UsageError if there is no file, or no such record.
    """
    # Imported here: the advisor reads this module's limits.
    from ouro_build.builder.advise import advise
    from ouro_build.builder.record_files import read_record

    advice = advise(read_record(path, CoverageRecord))
    return advice.buckets, advice.max_requests


def check_buckets(buckets: Sequence[int], flag: str, largest: int) -> None:
    """Raise UsageError unless `buckets` are positive, ascending, different and at most `largest`."""
    if not buckets:
        raise UsageError("no bucket is given", where=flag)
    for bucket in buckets:
        _check_range(bucket, 1, largest, flag)
    for a, b in pairwise(buckets):
        if a == b:
            raise UsageError(f"{a} is given twice", where=flag)
        if a > b:
            raise UsageError(f"{a} comes before {b}; buckets are ascending", where=flag)


def _check_parts(parts: Sequence[Part]) -> None:
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is given twice", where="--gpu", hint="An sm_X stands for its table's default part.")


def _check_range(value: int | None, least: int, most: int | None, flag: str) -> None:
    if value is None:
        return
    if value < least:
        raise UsageError(f"{value} is less than {least}", where=flag)
    if most is not None and value > most:
        raise UsageError(f"{value} is more than {most}", where=flag)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
