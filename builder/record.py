"""The recorder: a program's launches are noted, not made."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ouro_build.artifacts.plan import Buffer, Dim, Edge, Launch, Plan, Pool, ProgramKey
from ouro_build.kernels.sites import site_of
from ouro_build.kernels.tuning import NO_RESIDENCY, Residencies


def takes_residency(key: ProgramKey) -> bool:
    """Whether tables say what launches of the plan ask a multiprocessor for: it was found in dense decode steps."""
    return key.program in ("recurrent", "coda") and key.mode == "dense"


def residency_key(launch: Launch) -> tuple[str, str]:
    """What tables tell launches apart by: the kernel, and the kind of its shape where they have entries for it."""
    site = site_of(launch)
    return launch.specialization.kernel, "" if site is None else site.kind


def covers(residency: Residencies, launches: Sequence[Launch]) -> bool:
    """Whether `residency` says something of every launch: what is good for one depends on what all others ask for."""
    return all(residency_key(launch) in residency for launch in launches)


class Recorder:
    """Collects the launches of one plan: a chain, and what runs beside it.

    Each may follow one other, for which it waits inside if it is programmatic, and join more, which end before it starts.
    `residency` is what tables ask for launches of this plan.
    """

    def __init__(self, key: ProgramKey, residency: Residencies = NO_RESIDENCY) -> None:
        self._key = key
        self._residency = residency
        self._launches: list[Launch] = []
        self._names: set[str] = set()
        self._end = -1  # of the chain
        self._joins: list[int] = []  # of its next

    def workspace(self, name: str, dtype: str, *shape: Dim) -> Buffer:
        """A buffer that lives from its first to its last use in this program."""
        unique = f"{self._key}/{name}"
        if unique in self._names:
            raise ValueError(f"workspace {unique} is declared twice")
        self._names.add(unique)
        return Buffer(unique, Pool.WORKSPACE, dtype, shape)

    def add(self, launch: Launch, *, joins: Sequence[int] = ()) -> int:
        """Note `launch` as the next of the chain; returns its place in the program."""
        self._end = self.beside(launch, after=self._end, joins=[*joins, *self._joins])
        self._joins = []
        return self._end

    def join(self, launches: Sequence[int]) -> None:
        """Let the next of the chain start when `launches` have ended: what they wrote may be read early from there on."""
        self._joins.extend(launches)

    def beside(self, launch: Launch, *, after: int = -1, joins: Sequence[int] = ()) -> int:
        """Note `launch` as one beside the chain, after launch `after` or only its joins; returns its place in the program."""
        edge = Edge.PROGRAMMATIC if launch.specialization.options.programmatic else Edge.FULL
        first = ((after, edge),) if after >= 0 and after not in joins else ()
        others = tuple((other, Edge.FULL) for other in joins)
        self._launches.append(msgspec.structs.replace(launch, after=first + others))
        return len(self._launches) - 1

    @property
    def end(self) -> int:
        """The place of the chain's last launch."""
        return self._end

    def open_ends(self) -> tuple[int, ...]:
        """The launches beside the chain that nothing follows yet."""
        followed = {at for launch in self._launches for at, _ in launch.after}
        return tuple(at for at in range(len(self._launches)) if at not in followed and at != self._end)

    def plan(self) -> Plan:
        """What was recorded, with what tables ask for all of it. Where they do not, and the launches that ask for a carve-out
        ask for one, the others have it too: a multiprocessor divides its memory anew only when it has drained."""
        if covers(self._residency, self._launches):
            return Plan(self._key, tuple(map(self._resident, self._launches)))
        asked = {launch.specialization.options.carveout for launch in self._launches} - {-1}
        if len(asked) != 1:
            return Plan(self._key, tuple(self._launches))
        (carveout,) = asked
        return Plan(self._key, tuple(_asking(launch, carveout) for launch in self._launches))

    def _resident(self, launch: Launch) -> Launch:
        found = self._residency[residency_key(launch)]
        return _asking(launch, found.carveout, found.shared)


def _asking(launch: Launch, carveout: int, shared: int = 0) -> Launch:
    specialization = launch.specialization
    options = msgspec.structs.replace(specialization.options, carveout=carveout, shared=shared)
    return msgspec.structs.replace(launch, specialization=msgspec.structs.replace(specialization, options=options))
