"""The recorder: a program's launches are noted, not made."""

from __future__ import annotations

import msgspec

from ouro_build.artifacts.plan import Buffer, Dim, Edge, Launch, Plan, Pool, ProgramKey


class Recorder:
    """Collects the launches of one plan. Each waits for the one before it: inside, if it is programmatic."""

    def __init__(self, key: ProgramKey) -> None:
        self._key = key
        self._launches: list[Launch] = []
        self._names: set[str] = set()

    def workspace(self, name: str, dtype: str, *shape: Dim) -> Buffer:
        """A buffer that lives from its first to its last use in this program."""
        unique = f"{self._key}/{name}"
        if unique in self._names:
            raise ValueError(f"workspace {unique} is declared twice")
        self._names.add(unique)
        return Buffer(unique, Pool.WORKSPACE, dtype, shape)

    def add(self, launch: Launch) -> None:
        """Note `launch` as the next of the program."""
        before = len(self._launches) - 1
        edge = Edge.PROGRAMMATIC if launch.specialization.options.programmatic else Edge.FULL
        after = ((before, edge),) if before >= 0 else ()
        self._launches.append(msgspec.structs.replace(launch, after=after))

    def plan(self) -> Plan:
        """What was recorded."""
        return Plan(self._key, tuple(self._launches))
