"""Plans made ready for one worker: every argument as the eight bytes that a kernel reads.

A few array operations over all launches of all plans; nothing is done launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.columns import CONSTANT, FIRST_POOL, LOAD_TIME, Columns, PlanIndex
from ouro_build.artifacts.errors import DeviceError, FitError
from ouro_build.artifacts.plan import LOAD_TIME_VALUES, Edge, Pool, ProgramKey
from ouro_build.runtime.load_time import Values, check_divisors
from ouro_build.runtime.memory import Memory

SLOT = 8
"""Bytes of an argument slot, and of a pointer to one."""
_GRID_LIMITS = np.array([2**31 - 1, 65535, 65535], np.uint64)

Ready = tuple[int, int, int, int, int]
"""A launch: specialisation, grid x, y, z in blocks, and the address of its array of argument pointers."""


class Run(NamedTuple):
    """`times` runs of the plan of `key` in a graph; `join` is how each of them follows the run before it."""

    key: ProgramKey
    times: int
    join: Edge


class RelocatedPlans:
    """The launches of every plan with addresses and load-time values put in.

    The numbers that argument pointers lead to belong to this object: it must outlive their use. Raises FitError if a
    load-time value is missing, lacks its divisor, or makes a grid that no GPU takes; DeviceError if an address lies
    outside its pool.
    """

    def __init__(self, index: PlanIndex, columns: Columns, memory: Memory, values: Values) -> None:
        _check_known(index, columns, values)
        check_divisors(values, index.load_time)
        self._entries = {entry.key: entry for entry in index.plans}
        self._graphs = {
            graph.key: tuple(Run(index.plans[s.plan].key, s.times, s.join) for s in graph.steps) for graph in index.graphs
        }
        self._columns = columns
        self._slots = _slots(columns, memory, values)
        self._pointers = self._slots.ctypes.data + SLOT * np.arange(len(self._slots), dtype=np.uint64)
        self._launches = _launches(columns, _grids(columns, values), self._pointers)

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """Every plan's key, in stored order."""
        return tuple(self._entries)

    def has(self, key: ProgramKey) -> bool:
        """Whether there is a plan for `key`."""
        return key in self._entries

    @property
    def graphs(self) -> Mapping[ProgramKey, tuple[Run, ...]]:
        """What a replay of every graph runs, by graph key, in stored order."""
        return self._graphs

    def launches(self, key: ProgramKey) -> list[Ready]:
        """The plan's launches in order."""
        entry = self._entries[key]
        return list(map(tuple, self._launches[entry.first : entry.first + entry.launches].tolist()))

    def dependencies(self, key: ProgramKey) -> list[list[tuple[int, int]]]:
        """For each launch of the plan, the (launch, edge) pairs it depends on; launches are counted within the plan."""
        entry = self._entries[key]
        rows = self._columns.launches[entry.first : entry.first + entry.launches]
        first, counts = rows["first_dependency"].tolist(), rows["dependencies"].tolist()
        pairs = self._columns.dependencies
        if not first:
            return []
        start = first[0]
        near: list[tuple[int, int]] = pairs[start : first[-1] + counts[-1]].tolist()
        return [near[at - start : at - start + count] for at, count in zip(first, counts, strict=True)]


def _check_known(index: PlanIndex, columns: Columns, values: Values) -> None:
    launches = columns.launches
    used = columns.slots[columns.kinds == LOAD_TIME].tolist() + launches["grid"][launches["grid_kind"] == LOAD_TIME].tolist()
    names = {LOAD_TIME_VALUES[code] for code in used} | {entry.name for entry in index.load_time}
    missing = sorted(name.value for name in names - set(values))
    if missing:
        raise FitError(f"no value for {', '.join(missing)}", where="plans", hint="Use the ouro-build version that made it.")


def _table(values: Values) -> NDArray[np.uint64]:
    """The values by their stored code."""
    return np.array([values.get(name, 0) for name in LOAD_TIME_VALUES], np.uint64)


def _slots(columns: Columns, memory: Memory, values: Values) -> NDArray[np.uint64]:
    kinds = columns.kinds
    _check_addresses(columns, memory)
    slots = columns.slots + _by_pool(memory.base)[kinds]
    known = kinds == LOAD_TIME
    slots[known] = _table(values)[columns.slots[known]]
    return slots


def _by_pool(look_up: Callable[[Pool], int]) -> NDArray[np.uint64]:
    """`look_up` of every pool at its argument kind; 0 at the other kinds."""
    table = np.zeros(FIRST_POOL + len(Pool), np.uint64)
    for pool in Pool:
        table[FIRST_POOL + int(pool)] = look_up(pool)
    return table


def _check_addresses(columns: Columns, memory: Memory) -> None:
    outside = (columns.kinds >= FIRST_POOL) & (columns.slots >= _by_pool(memory.size)[columns.kinds])
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        pool = Pool(int(columns.kinds[at]) - FIRST_POOL)
        raise DeviceError(
            f"a plan uses byte {int(columns.slots[at])} of a pool of {memory.size(pool)}", where=pool.name.lower()
        )


def _grids(columns: Columns, values: Values) -> NDArray[np.uint64]:
    grid, kind = columns.launches["grid"].astype(np.uint64), columns.launches["grid_kind"]
    known = kind != CONSTANT
    grid[known] = _table(values)[grid[known]]
    bad = (grid < 1) | (grid > _GRID_LIMITS)
    if bad.any():
        launch = int(np.argwhere(bad)[0][0])
        x, y, z = grid[launch].tolist()
        raise FitError(f"launch {launch} has a grid of {x} × {y} × {z} blocks, which no GPU takes", where="plans")
    return grid


def _launches(columns: Columns, grids: NDArray[np.uint64], pointers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One row a launch, in the order of `Ready`."""
    rows = np.empty((len(columns.launches), 5), np.uint64)
    rows[:, 0] = columns.launches["specialization"]
    rows[:, 1:4] = grids
    rows[:, 4] = pointers.ctypes.data + SLOT * columns.launches["first_argument"].astype(np.uint64)
    return rows
