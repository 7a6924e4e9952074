"""Retained masses are gathered behind the steps: no copy is waited for before its step, none is lost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.runtime.memory import HostMemory, Pending
from ouro_build.runtime.retained_mass import RetainedMass

MASS = Buffer("reference_mass", Pool.REFERENCES, "float32", (4, 2, 3), 256)


class Noting(HostMemory):
    """Notes which copies were asked for and which were looked at."""

    def __init__(self) -> None:
        super().__init__({Pool.REFERENCES: 1024})
        self.asked: list[tuple[int, int]] = []
        self.looked = 0

    def read_later(self, pool: Pool, offset: int, nbytes: int) -> Pending:
        self.asked.append((offset, nbytes))
        memory, pending = self, super().read_later(pool, offset, nbytes)

        class Looked:
            def result(self) -> NDArray[np.uint8]:
                memory.looked += 1
                return pending.result()

        return Looked()


def put(memory: HostMemory, slot: int, value: float) -> None:
    memory.write(Pool.REFERENCES, 256 + slot * 24, np.full(6, value, np.float32))


def test_one_copy_a_step_of_the_slots_captured_into() -> None:
    memory = Noting()
    mass = RetainedMass(memory, MASS)
    for slot in range(4):
        put(memory, slot, 0.2 * slot + 0.11)
    mass.captured([3, 1])
    mass.captured(())
    assert memory.asked == [(256 + 24, 3 * 24)]
    assert (memory.looked, mass.submitted) == (0, 1)
    put(memory, 1, 0.99)  # the next step's: what was copied stays
    mass.take(1)
    seen = mass.record()
    assert memory.looked == 1
    assert seen.values == 12
    assert {i: c for i, c in enumerate(seen.counts) if c} == {6: 6, 14: 6}
    assert np.isclose(seen.mean, (0.31 + 0.71) / 2)
    assert np.isclose(seen.least, 0.31)
    assert seen.bytes == 72
    assert seen.seconds > 0


def test_only_what_a_step_submitted_is_looked_at_with_it() -> None:
    memory = Noting()
    mass = RetainedMass(memory, MASS)
    put(memory, 0, 1.0)
    mass.captured([0])
    first = mass.submitted
    mass.captured([0])
    mass.take(first)
    assert memory.looked == 1
    assert mass.record().values == 12
    assert mass.record().counts[-1] == 12, "a mass of 1 is in the last part"
    mass.clear()
    assert (mass.record().values, mass.record().mean, mass.submitted) == (0, 0.0, 2)


def test_where_nobody_waits_for_steps_copies_do_not_pile_up() -> None:
    memory = Noting()
    mass = RetainedMass(memory, MASS)
    for _ in range(100):
        mass.captured([2])
    assert memory.looked == 100 - 64
    assert mass.record().values == 600
