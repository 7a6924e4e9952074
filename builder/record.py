"""The recorder: a program's launches are noted, not made."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ouro_build.artifacts.plan import Buffer, Dim, Edge, Launch, Plan, Pool, ProgramKey


class Recorder:
    """Collects the launches of one plan: a chain, and what runs beside it.

    Each may follow one other, for which it waits inside if it is programmatic, and join more, which end before it starts.
    """

    def __init__(self, key: ProgramKey) -> None:
        self._key = key
        self._launches: list[Launch] = []
        self._names: set[str] = set()
        self._last = -1  # of the chain

    def workspace(self, name: str, dtype: str, *shape: Dim) -> Buffer:
        """A buffer that lives from its first to its last use in this program."""
        unique = f"{self._key}/{name}"
        if unique in self._names:
            raise ValueError(f"workspace {unique} is declared twice")
        self._names.add(unique)
        return Buffer(unique, Pool.WORKSPACE, dtype, shape)

    def add(self, launch: Launch, *, joins: Sequence[int] = ()) -> int:
        """Note `launch` as the next of the chain; returns its place in the program."""
        self._last = self.beside(launch, after=self._last, joins=joins)
        return self._last

    def add_settled(self, launch: Launch) -> int:
        """As `add`, but it starts when all of the chain so far has ended: later launches may read early what that wrote."""
        self._last = self.beside(launch, joins=[self._last])
        return self._last

    def beside(self, launch: Launch, *, after: int = -1, joins: Sequence[int] = ()) -> int:
        """Note `launch` as one beside the chain, after launch `after` or only its joins; returns its place in the program."""
        edge = Edge.PROGRAMMATIC if launch.specialization.options.programmatic else Edge.FULL
        first = ((after, edge),) if after >= 0 else ()
        others = tuple((other, Edge.FULL) for other in joins)
        self._launches.append(msgspec.structs.replace(launch, after=first + others))
        return len(self._launches) - 1

    def open_ends(self) -> tuple[int, ...]:
        """The launches beside the chain that nothing follows yet."""
        followed = {at for launch in self._launches for at, _ in launch.after}
        return tuple(at for at in range(len(self._launches)) if at not in followed and at != self._last)

    def plan(self) -> Plan:
        """What was recorded."""
        return Plan(self._key, tuple(self._launches))
