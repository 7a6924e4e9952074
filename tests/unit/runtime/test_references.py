"""Reference slots: nobody reads what is another's, nothing is handed out while work on it may still run."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from numpy.typing import NDArray

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.memory import HostMemory, Memory
from ouro_build.runtime.references import Lease, ReferencePool, SlotState, clear_slots, fill_references
from tests.unit.runtime.fake_driver import FakeDriver

SLOTS = 5
OWNERS = ("a", "b", "c")
GONE = re.compile("is stale|is retired")


class PoolAgainstModel(RuleBasedStateMachine):
    """Random work on a pool, against a plain account of who has what, and of a stream that finishes in order."""

    leases: Bundle[Lease] = Bundle("leases")
    gone: Bundle[Lease] = Bundle("gone")

    def __init__(self) -> None:
        super().__init__()
        self.cleared: list[int] = []
        self.pool = ReferencePool(SLOTS, self.cleared.extend)
        self.live: dict[Lease, tuple[str, SlotState]] = {}
        self.stream: list[int] = []  # slots that submitted work uses, oldest first
        self.retired: dict[int, int] = {}  # slot: position in the stream of the last work on it
        self.finished = 0
        self.expected_clears: list[int] = []
        self.tickets: list[tuple[int, int]] = []

    def use(self, lease: Lease) -> None:
        self.stream.append(lease.slot)

    @rule(target=leases, owner=st.sampled_from(OWNERS), count=st.integers(1, 3))
    def bind(self, owner: str, count: int) -> MultipleResults[Lease]:
        free = SLOTS - len(self.live) - len(self.retired)
        assert self.pool.free == free
        if count > free:
            with pytest.raises(RequestError, match=f"{count} reference slots wanted, {free} of {SLOTS} free"):
                self.pool.bind(owner, count)
            return multiple()
        before = self.pool.held(owner)
        made = self.pool.bind(owner, count)
        taken = {lease.slot for lease in made}
        assert len(taken) == count
        assert not taken & before
        assert not taken & {lease.slot for lease in self.live}
        assert not taken & set(self.retired), "work on the slot may still be running"
        self.live |= dict.fromkeys(made, (owner, SlotState.EMPTY))
        return multiple(*made)

    @rule(lease=leases)
    def capture(self, lease: Lease) -> None:
        if lease not in self.live:
            return self.refused(lease)
        self.pool.capture(lease)
        self.live[lease] = (self.live[lease][0], SlotState.SOURCE_READY)
        return self.use(lease)

    @rule(lease=leases)
    def consume(self, lease: Lease) -> None:
        if lease not in self.live:
            return self.refused(lease)
        if self.live[lease][1] is SlotState.EMPTY:
            with pytest.raises(RequestError, match="is empty: no loop has captured"):
                self.pool.consume(lease)
            return None
        self.pool.consume(lease)
        self.live[lease] = (self.live[lease][0], SlotState.REUSABLE)
        return self.use(lease)

    @rule(target=leases, lease=leases)
    def reject(self, lease: Lease) -> MultipleResults[Lease]:
        if lease not in self.live:
            self.refused(lease)
            return multiple()
        owner, _ = self.live.pop(lease)
        fresh = self.pool.reject(lease)
        assert fresh.slot == lease.slot
        assert fresh != lease
        self.live[fresh] = (owner, SlotState.EMPTY)
        self.use(lease)
        self.expected_clears.append(lease.slot)
        return multiple(fresh)

    @rule(target=gone, lease=consumes(leases))
    def retire(self, lease: Lease) -> Lease:
        if lease not in self.live:
            self.refused(lease)
            return lease
        self.pool.retire([lease])
        del self.live[lease]
        last = max((i + 1 for i, slot in enumerate(self.stream) if slot == lease.slot), default=0)
        if last > self.finished:
            self.retired[lease.slot] = last
        self.expected_clears.append(lease.slot)
        return lease

    @rule(lease=gone)
    def refused(self, lease: Lease) -> None:
        for call in (self.pool.state, self.pool.capture, self.pool.consume, self.pool.reject):
            with pytest.raises(RequestError, match=GONE):
                call(lease)
        with pytest.raises(RequestError, match=GONE):
            self.pool.retire([lease])
        with pytest.raises(RequestError, match=GONE):
            self.pool.check(lease.slot, lease.generation)

    @rule()
    def submit(self) -> None:
        self.tickets.append((self.pool.submitted(), len(self.stream)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """The host learns that a step has finished, not always of every one and never before those ahead of it."""
        at = data.draw(st.integers(0, len(self.tickets) - 1))
        ticket, position = self.tickets[at]
        del self.tickets[: at + 1]
        self.pool.finished(ticket)
        self.finished = max(self.finished, position)
        self.retired = {slot: last for slot, last in self.retired.items() if last > position}

    @invariant()
    def agrees(self) -> None:
        assert self.pool.leaving == len(self.retired)
        assert self.pool.free == SLOTS - len(self.live) - len(self.retired)
        assert self.cleared == self.expected_clears, "only what is retired or rejected is cleared, and at once"
        for lease, (_, state) in self.live.items():
            assert self.pool.state(lease) is state
            assert self.pool.check(lease.slot, lease.generation) == lease
        for owner in OWNERS:
            mine = {lease.slot for lease, (o, _) in self.live.items() if o == owner}
            assert self.pool.held(owner) == mine
        assert self.pool.padding not in {lease.slot for lease in self.live}


PoolAgainstModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def pool(slots: int = 2, clear: list[Sequence[int]] | None = None) -> ReferencePool:
    return ReferencePool(slots, ([] if clear is None else clear).append)


def test_a_slot_that_was_given_up_waits_for_its_last_reader() -> None:
    references = pool(1)
    (lease,) = references.bind("a")
    references.capture(lease)
    early = references.submitted()
    references.consume(lease)
    references.retire([lease])
    references.finished(early)
    with pytest.raises(RequestError, match="1 reference slots wanted, 0 of 1 free"):
        references.bind("b")
    references.finished(references.submitted())
    (again,) = references.bind("b")
    assert (again.slot, again.generation) == (lease.slot, lease.generation + 1)


def test_retiring_is_all_or_nothing_and_one_clearing() -> None:
    cleared: list[Sequence[int]] = []
    references = pool(3, cleared)
    first, second, third = references.bind("a", 3)
    with pytest.raises(RequestError, match="retired twice"):
        references.retire([first, first])
    references.retire([first])
    with pytest.raises(RequestError, match="is retired"):
        references.retire([second, first])
    assert references.state(second) is SlotState.EMPTY
    references.retire([second, third])
    assert cleared == [(first.slot,), (second.slot, third.slot)]


def test_slots_that_no_pool_has() -> None:
    references = pool(2)
    for slot in (-1, 2, references.padding):
        with pytest.raises(RequestError, match="outside 0 … 1"):
            references.check(slot, 1)


def test_generations_begin_again_before_they_leave_an_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ouro_build.runtime.references.GENERATIONS", 3)
    references = pool(1)
    (lease,) = references.bind("a")
    seen = [lease.generation]
    for _ in range(3):
        lease = references.reject(lease)
        seen.append(lease.generation)
    assert seen == [1, 2, 0, 1]


@pytest.mark.parametrize("on_device", [False, True])
def test_clearing_leaves_payloads_and_other_slots(on_device: bool) -> None:
    shapes = {
        "retained_counts": (5,),
        "reference_records": (3, 2, 2),
        "reference_mass": (3, 2, 4),
        "reference_keys": (3, 2, 4, 7),
    }
    buffers, end = {}, 0
    for name, shape in shapes.items():
        buffers[name] = Buffer(name, Pool.REFERENCES, "float32" if name == "reference_mass" else "int32", shape, end)
        end += -(-buffers[name].bytes // 256) * 256
    sizes = {Pool.REFERENCES: end}
    memory: Memory = DeviceMemory(open_driver(0, FakeDriver()), sizes) if on_device else HostMemory(sizes)

    def held(name: str) -> NDArray[np.int32]:
        return memory.read(Pool.REFERENCES, buffers[name].offset, buffers[name].bytes).view(np.int32).reshape(shapes[name])

    memory.fill(Pool.REFERENCES, 0xFF)
    fill_references(memory, buffers, np.array([0, 1, 1, 2, 2], np.int32))
    assert held("retained_counts").tolist() == [0, 1, 1, 2, 2]
    assert not held("reference_records").any()
    for name in ("reference_records", "reference_mass", "reference_keys"):
        memory.write(Pool.REFERENCES, buffers[name].offset, np.full(shapes[name], 9, np.int32))
    clear_slots(memory, buffers, [0, 2])
    for name in ("reference_records", "reference_mass"):
        assert not held(name)[[0, 2]].any()
        assert (held(name)[1] == 9).all()
    assert (held("reference_keys") == 9).all()
    assert held("retained_counts").tolist() == [0, 1, 1, 2, 2]
