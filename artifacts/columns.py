"""Plans as columns of numbers: one table of launches, one of argument slots, one of dependencies.

A worker relocates every argument of every plan with a few array operations instead of visiting launches one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.plan import (
    KERNEL_NODE,
    LOAD_TIME_VALUES,
    Argument,
    Buffer,
    Dim,
    Edge,
    Launch,
    LoadTimeValue,
    Plan,
    Pool,
    ProgramKey,
    Specialization,
)

CONSTANT = 0
LOAD_TIME = 1
TENSOR_MAP = 2  # reserved: no format 1.0 plan holds one
FIRST_POOL = 16
NO_BUFFER = 0xFFFFFFFF
SCRATCH_ARGUMENTS = 2
"""Every Triton kernel takes two more pointers after its arguments: global scratch and profile scratch. Both are null."""

LAUNCH = np.dtype(
    [
        ("specialization", "<u4"),
        ("grid", "<u4", (3,)),
        ("grid_kind", "u1", (3,)),
        ("tag", "u1"),
        ("first_argument", "<u4"),
        ("arguments", "<u4"),
        ("first_dependency", "<u4"),
        ("dependencies", "<u4"),
    ]
)
DEPENDENCY = np.dtype([("launch", "<u4"), ("edge", "<u4")])


class PlanEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a plan's launches lie in the launch column."""

    key: ProgramKey
    first: int
    launches: int


class GraphStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`times` runs of plan number `plan`, one after another; `join` is how each of them follows the run before it."""

    plan: int
    times: int = 1
    join: Edge = Edge.FULL


class GraphEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph: the plans that one replay runs. One that has a plan's key is that plan, once."""

    key: ProgramKey
    steps: tuple[GraphStep, ...]


class LoadTimeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load-time value that the plans use, and a divisor that its value must have."""

    name: LoadTimeValue
    divisor: int


class PlanIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The named half of a target's plans; the numbers lie in `Columns`."""

    buffers: tuple[Buffer, ...]
    specializations: tuple[Specialization, ...]
    load_time: tuple[LoadTimeEntry, ...]
    plans: tuple[PlanEntry, ...]
    graphs: tuple[GraphEntry, ...]
    launches: int
    arguments: int
    dependencies: int


class Columns(msgspec.Struct, frozen=True):
    """The numeric half. `slots` holds a constant's bits, a load-time value's code, or an offset in the pool of `kinds`."""

    launches: NDArray[np.void]
    slots: NDArray[np.uint64]
    kinds: NDArray[np.uint8]
    buffers: NDArray[np.uint32]
    dependencies: NDArray[np.void]

    def to_bytes(self) -> bytes:
        """The stored form: the five columns one after another, each padded to 8 bytes."""
        parts = (self.launches, self.slots, self.kinds, self.buffers, self.dependencies)
        return b"".join(_padded(part.tobytes()) for part in parts)


def columns_from_bytes(index: PlanIndex, raw: bytes, where: str) -> Columns:
    """Read what `Columns.to_bytes` wrote. Raises ArtifactError if the size or any reference inside is wrong."""
    layout = (
        (LAUNCH, index.launches),
        (np.dtype("<u8"), index.arguments),
        (np.dtype("u1"), index.arguments),
        (np.dtype("<u4"), index.arguments),
        (DEPENDENCY, index.dependencies),
    )
    expected = sum(_round8(kind.itemsize * count) for kind, count in layout)
    if len(raw) != expected:
        raise ArtifactError(f"{len(raw)} bytes, {expected} expected from the plan index", where=where)
    arrays: list[Any] = []
    at = 0
    for kind, count in layout:
        arrays.append(np.frombuffer(raw, kind, count, at))
        at += _round8(kind.itemsize * count)
    columns = Columns(*arrays)
    _check(index, columns, where)
    return columns


def encode(plans: Sequence[Plan], buffers: Sequence[Buffer], load_time: Sequence[LoadTimeEntry]) -> tuple[PlanIndex, Columns]:
    """Store `plans`, whose buffers must all be placed and listed in `buffers`, with a graph of each."""
    specializations = tuple(dict.fromkeys(x.specialization for p in plans for x in p.launches))
    writer = _Writer(
        {s: i for i, s in enumerate(specializations)},
        {b: i for i, b in enumerate(buffers)},
    )
    entries = []
    for plan in plans:
        entries.append(PlanEntry(plan.key, len(writer.launches), len(plan.launches)))
        for launch in plan.launches:
            writer.add(launch)
    columns = writer.columns()
    index = PlanIndex(
        buffers=tuple(buffers),
        specializations=specializations,
        load_time=tuple(load_time),
        plans=tuple(entries),
        graphs=tuple(GraphEntry(entry.key, (GraphStep(i),)) for i, entry in enumerate(entries)),
        launches=len(columns.launches),
        arguments=len(columns.slots),
        dependencies=len(columns.dependencies),
    )
    return index, columns


def decode(index: PlanIndex, columns: Columns) -> tuple[Plan, ...]:
    """The plans that `encode` stored, launch by launch."""
    return tuple(decode_plan(index, columns, entry) for entry in index.plans)


def decode_plan(index: PlanIndex, columns: Columns, entry: PlanEntry) -> Plan:
    """One of the plans that `encode` stored."""
    launches = range(entry.first, entry.first + entry.launches)
    return Plan(entry.key, tuple(_launch(index, columns, at) for at in launches))


class _Writer:
    def __init__(self, specializations: dict[Specialization, int], buffers: dict[Buffer, int]) -> None:
        self._specializations = specializations
        self._buffers = buffers
        self.launches: list[tuple[object, ...]] = []
        self._arguments: list[tuple[int, int, int]] = []
        self._dependencies: list[tuple[int, int]] = []

    def add(self, launch: Launch) -> None:
        first_argument, first_dependency = len(self._arguments), len(self._dependencies)
        types = launch.specialization.types
        self._arguments += [self._argument(a, t) for a, (_, t) in zip(launch.arguments, types, strict=True)]
        self._arguments += [(0, CONSTANT, NO_BUFFER)] * SCRATCH_ARGUMENTS
        self._dependencies += [(at, int(edge)) for at, edge in launch.after]
        grid = [_dim_code(d) for d in launch.grid]
        self.launches.append(
            (
                self._specializations[launch.specialization],
                [value for value, _ in grid],
                [kind for _, kind in grid],
                KERNEL_NODE,
                first_argument,
                len(self._arguments) - first_argument,
                first_dependency,
                len(self._dependencies) - first_dependency,
            )
        )

    def _argument(self, argument: Argument, kind: str) -> tuple[int, int, int]:
        if isinstance(argument, Buffer):
            return argument.offset, FIRST_POOL + int(argument.pool), self._buffers[argument]
        if isinstance(argument, LoadTimeValue):
            return LOAD_TIME_VALUES.index(argument), LOAD_TIME, NO_BUFFER
        return _constant_bits(argument, kind), CONSTANT, NO_BUFFER

    def columns(self) -> Columns:
        slots, kinds, buffers = zip(*self._arguments, strict=True) if self._arguments else ((), (), ())
        return Columns(
            np.array(self.launches, LAUNCH),
            np.array(slots, "<u8"),
            np.array(kinds, "u1"),
            np.array(buffers, "<u4"),
            np.array(self._dependencies, DEPENDENCY),
        )


_FORMATS = {"fp32": "<f", "i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q"}


def _constant_bits(value: float, kind: str) -> int:
    return int.from_bytes(struct.pack(_FORMATS[kind], value), "little")


def _constant_value(bits: int, kind: str) -> int | float:
    form = _FORMATS[kind]
    value: int | float = struct.unpack_from(form, int(bits).to_bytes(8, "little"))[0]
    return value


def _dim_code(dim: Dim) -> tuple[int, int]:
    return (LOAD_TIME_VALUES.index(dim), LOAD_TIME) if isinstance(dim, LoadTimeValue) else (dim, CONSTANT)


def _dim(value: int, kind: int) -> Dim:
    return LOAD_TIME_VALUES[value] if kind == LOAD_TIME else int(value)


def _launch(index: PlanIndex, columns: Columns, at: int) -> Launch:
    row = columns.launches[at]
    specialization = index.specializations[int(row["specialization"])]
    first = int(row["first_argument"])
    arguments = tuple(_decoded(index, columns, first + i, kind) for i, (_, kind) in enumerate(specialization.types))
    start, count = int(row["first_dependency"]), int(row["dependencies"])
    after = tuple((int(d["launch"]), Edge(int(d["edge"]))) for d in columns.dependencies[start : start + count])
    x, y, z = (_dim(int(v), int(k)) for v, k in zip(row["grid"], row["grid_kind"], strict=True))
    return Launch(specialization=specialization, grid=(x, y, z), arguments=arguments, after=after)


def _decoded(index: PlanIndex, columns: Columns, at: int, kind: str) -> Argument:
    code, slot = int(columns.kinds[at]), int(columns.slots[at])
    if code >= FIRST_POOL:
        return index.buffers[int(columns.buffers[at])]
    return LOAD_TIME_VALUES[slot] if code == LOAD_TIME else _constant_value(slot, kind)


def _check(index: PlanIndex, columns: Columns, where: str) -> None:
    """Every number that will be used as an index or an offset is in range before anything uses it."""
    launches, kinds, slots = columns.launches, columns.kinds, columns.slots
    if (launches["tag"] != KERNEL_NODE).any():
        tag = int(launches["tag"][launches["tag"] != KERNEL_NODE][0])
        raise ArtifactError(f"node tag {tag} is not known to format 1.0 (only {KERNEL_NODE}, kernel)", where=where)
    if (kinds == TENSOR_MAP).any():
        raise ArtifactError("tensor map arguments are not known to format 1.0", where=where)
    pools = {FIRST_POOL + int(pool) for pool in Pool}
    _refuse(~np.isin(kinds, [CONSTANT, LOAD_TIME, *pools]), "argument kind", where)
    _refuse((kinds == LOAD_TIME) & (slots >= len(LOAD_TIME_VALUES)), "load-time value of an argument", where)
    pointer = kinds >= FIRST_POOL
    _refuse(pointer & (columns.buffers >= len(index.buffers)), "buffer of an argument", where)
    table = np.array([(b.offset, FIRST_POOL + int(b.pool)) for b in index.buffers] or [(0, 0)], "<i8")
    found = table[np.where(pointer, columns.buffers, 0)]
    _refuse(pointer & ((found[:, 0] != slots) | (found[:, 1] != kinds)), "address of an argument", where)
    grid_kind = launches["grid_kind"]
    _refuse(~np.isin(grid_kind, [CONSTANT, LOAD_TIME]), "grid kind", where)
    _refuse((grid_kind == LOAD_TIME) & (launches["grid"] >= len(LOAD_TIME_VALUES)), "load-time value of a grid", where)
    _refuse(launches["specialization"] >= len(index.specializations), "specialization of a launch", where)
    _check_ranges(index, columns, where)


def _check_ranges(index: PlanIndex, columns: Columns, where: str) -> None:
    launches, dependencies = columns.launches, columns.dependencies
    for first, count, size, what in (
        ("first_argument", "arguments", len(columns.slots), "argument range"),
        ("first_dependency", "dependencies", len(dependencies), "dependency range"),
    ):
        ends = np.cumsum(launches[count], dtype=np.int64)
        _refuse(ends - launches[count] != launches[first], f"{what} of a launch", where)
        if (int(ends[-1]) if len(ends) else 0) != size:
            raise ArtifactError(f"the {what}s of all launches do not cover the column", where=where)
    wanted = np.array([len(s.types) + SCRATCH_ARGUMENTS for s in index.specializations] or [0])
    _refuse(launches["arguments"] != wanted[launches["specialization"]], "argument count of a launch", where)
    _refuse(dependencies["edge"] > max(Edge), "edge of a dependency", where)
    counts = np.array([e.launches for e in index.plans], np.int64)
    firsts = np.cumsum(counts) - counts
    if int(counts.sum()) != len(launches) or [e.first for e in index.plans] != firsts.tolist():
        raise ArtifactError("the plans do not cover the launch column one after another", where=where)
    within = np.arange(len(launches)) - np.repeat(firsts, counts)
    owners = np.repeat(within, launches["dependencies"])
    _refuse(dependencies["launch"] >= owners, "dependency on a later launch", where)


def _refuse(bad: NDArray[np.bool_], what: str, where: str) -> None:
    if bad.any():
        raise ArtifactError(f"{what} is out of range at index {int(np.argwhere(bad)[0][0])}", where=where)


def _round8(size: int) -> int:
    return -(-size // 8) * 8


def _padded(raw: bytes) -> bytes:
    return raw.ljust(_round8(len(raw)), b"\0")
