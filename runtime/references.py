"""Which reference slots are whose.

A reference slot holds what a source loop remembered of one live token: the keys that it chose, their mass, their
contribution and the attention output, for every layer and head. The pool keeps no such data: it says who may read and write
a slot, and when another may have it.

All work on the slots is submitted to one stream. So a capture may be read by whatever is submitted after it, and a slot that
is retired may be another's as soon as the last work on it has finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import Buffer
from ouro_build.runtime.memory import Memory

GENERATIONS = 2**31 - 1
"""Generations of a slot before they begin again: a row names one in an int32."""


class SlotState(Enum):
    """What a slot holds. A slot that nobody has is `RETIRED`, or was never bound."""

    EMPTY = "empty"  # bound, nothing captured yet
    SOURCE_READY = "source-ready"  # a capture was submitted: later loops may consume it
    REUSABLE = "reusable"  # a loop has consumed it, and others may
    RETIRED = "retired"  # nobody's: free once the last work on it has finished


@dataclass(frozen=True)
class Lease:
    """The right to use `slot`, until it is retired or rejected: from then on `generation` is not the slot's any more."""

    slot: int
    generation: int


@dataclass
class _Slot:
    generation: int = 0
    state: SlotState = SlotState.RETIRED
    owner: Hashable = None
    last_use: int = 0


class ReferencePool:
    """Hands out `slots` reference slots, numbered from 0. The slot `padding`, one past them, is never anybody's.

    `clear(slots)` submits the clearing of what gates readers (counts and masses), and no more: payloads stay as they are, and
    a capture overwrites the part that it uses. Use from one thread.
    """

    def __init__(self, slots: int, clear: Callable[[Sequence[int]], None]) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._free = deque(range(slots))
        self._leaving: list[int] = []
        self._clear = clear
        self._submitted = self._finished = 0

    @property
    def padding(self) -> int:
        """The slot that padded rows name."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Slots that can be bound now."""
        return len(self._free)

    @property
    def leaving(self) -> int:
        """Slots that are retired, whose last work is not known to have finished."""
        return len(self._leaving)

    def bind(self, owner: Hashable, count: int = 1) -> tuple[Lease, ...]:
        """`count` free slots for `owner`, empty, none of which anybody else has, nor `owner` for an earlier round.

        Raises RequestError, and binds none, if there are fewer.
        """
        if count > len(self._free):
            raise RequestError(
                f"{count} reference slots wanted, {len(self._free)} of {len(self._slots)} free",
                hint="Wait for a request to finish, or build with more --reference-slots.",
            )
        leases = []
        for _ in range(count):
            index = self._free.popleft()
            slot = self._slots[index]
            slot.state, slot.owner = SlotState.EMPTY, owner
            leases.append(self._renewed(index))
        return tuple(leases)

    def state(self, lease: Lease) -> SlotState:
        """What the slot holds. Raises RequestError if the lease is not in force."""
        return self._checked(lease).state

    def held(self, owner: Hashable) -> frozenset[int]:
        """Slots that `owner` has."""
        return frozenset(i for i, s in enumerate(self._slots) if s.state is not SlotState.RETIRED and s.owner == owner)

    def check(self, slot: int, generation: int) -> Lease:
        """The lease of `generation` on `slot`. Raises RequestError if there is none, or one of another generation."""
        if not 0 <= slot < len(self._slots):
            raise RequestError(f"reference slot {slot} is outside 0 … {len(self._slots) - 1}")
        lease = Lease(slot, generation)
        self._checked(lease)
        return lease

    def capture(self, lease: Lease) -> None:
        """A capture into the slot is being submitted; it replaces an earlier one. Raises RequestError for a stale lease."""
        self._use(lease).state = SlotState.SOURCE_READY

    def consume(self, lease: Lease) -> None:
        """A loop that consumes the slot is being submitted. Raises RequestError for a stale lease or an empty slot."""
        if self._checked(lease).state is SlotState.EMPTY:
            raise RequestError(
                f"reference slot {lease.slot} is empty: no loop has captured into it",
                hint="Run the row's source loop in mode capture first.",
            )
        self._use(lease).state = SlotState.REUSABLE

    def reject(self, lease: Lease) -> Lease:
        """Forget what the slot holds and leave it with its owner, empty, under the lease returned; the old one is stale.

        Raises RequestError for a stale lease.
        """
        self._use(lease).state = SlotState.EMPTY
        self._clear((lease.slot,))
        return self._renewed(lease.slot)

    def retire(self, leases: Sequence[Lease]) -> None:
        """Give slots up. Each is free once the last capture or consumption of it has finished: see `finished`.

        The clearing need not have: the next capture into the slot is submitted after it. Raises RequestError, and retires
        none, if a lease is stale or named twice.
        """
        slots = {lease.slot: self._checked(lease) for lease in leases}
        if len(slots) != len(leases):
            raise RequestError(f"a reference slot is retired twice: {[lease.slot for lease in leases]}")
        for slot in slots.values():
            slot.state, slot.owner = SlotState.RETIRED, None
        self._leaving += slots
        if slots:
            self._clear(tuple(slots))
        self.finished(self._finished)

    def submitted(self) -> int:
        """A ticket for all work on the slots that was submitted so far; give it to `finished` once that work has finished."""
        return self._submitted

    def finished(self, ticket: int) -> None:
        """The work that `submitted` gave `ticket` for has finished on the device: slots that it used last are free."""
        self._finished = max(self._finished, ticket)
        free = [index for index in self._leaving if self._slots[index].last_use <= self._finished]
        self._free += free
        self._leaving = [index for index in self._leaving if index not in free]

    def _use(self, lease: Lease) -> _Slot:
        slot = self._checked(lease)
        self._submitted += 1
        slot.last_use = self._submitted
        return slot

    def _renewed(self, index: int) -> Lease:
        slot = self._slots[index]
        slot.generation = (slot.generation + 1) % GENERATIONS
        return Lease(index, slot.generation)

    def _checked(self, lease: Lease) -> _Slot:
        slot = self._slots[lease.slot]
        if slot.state is SlotState.RETIRED:
            raise RequestError(f"reference slot {lease.slot} is retired; generation {lease.generation} was given up")
        if slot.generation != lease.generation:
            raise RequestError(
                f"generation {lease.generation} of reference slot {lease.slot} is stale, it is at {slot.generation}",
                hint="Name the slot and the generation of the request's present lease.",
            )
        return slot


def clear_slots(memory: Memory, buffers: Mapping[str, Buffer], slots: Sequence[int]) -> None:
    """Submit zeros to what gates the readers of `slots`: their records and masses."""
    for name in ("reference_records", "reference_mass"):
        buffer = buffers[name]
        size = buffer.bytes // buffer.sizes[0]
        for slot in slots:
            memory.write(buffer.pool, buffer.offset + slot * size, np.zeros(size, np.uint8))


def fill_references(memory: Memory, buffers: Mapping[str, Buffer], retained_counts: NDArray[np.int32]) -> None:
    """Make every reference slot empty, and put the table of retained keys where the programs look for it."""
    table = buffers["retained_counts"]
    memory.fill(table.pool, 0)
    memory.write(table.pool, table.offset, retained_counts)
