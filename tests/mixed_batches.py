"""Random batches of rows in different modes and loops, with holes: one `mixed` program against a program of each mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.rows import SOURCE_LOOP, Mode
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.memory import Memory
from ouro_build.runtime.step import Steps

MIXED_LIMIT = 1e-6
"""How far a dense or capturing row's state may be from what the uniform program gives; all else is equal in every bit."""
_POOLS = (Pool.KV, Pool.STATE, Pool.REFERENCES)
_STORED = ("reference_records", "reference_mass", "reference_keys", "reference_output", "reference_contribution")
Snapshot = dict[Pool, NDArray[np.uint8]]
N = TypeVar("N", np.uint8, np.float32)


@dataclass
class Seen:
    """What a run of batches came to: `mixed` of the batches were of several modes, `captures` of those captured."""

    batches: int = 0
    mixed: int = 0
    captures: int = 0
    worst: float = 0.0


class MixedBatches:
    """Requests 0, 1, … in the state slots of the same number, as many as the largest bucket, each with a reference slot.

    Without `exact` all values may differ by `limit`, as where `mixed` runs by other arithmetic than the uniform programs.
    """

    def __init__(self, steps: Steps, memory: Memory, seed: int, *, limit: float = MIXED_LIMIT, exact: bool = True) -> None:
        self._limit, self._exact = limit, exact
        assert steps.references is not None
        self._steps, self._memory = steps, memory
        self._rng = np.random.default_rng(seed)
        self._count = steps.geometry.buckets[-1]
        self._leases = steps.references.bind("batches", self._count)
        for request in range(self._count):
            self._start(request)

    def close(self) -> None:
        """Give the reference slots back."""
        assert self._steps.references is not None
        self._steps.references.retire(self._leases)

    def run(self, batches: int) -> Seen:
        """Compare `batches` random batches; raises AssertionError for one that is not as it should be."""
        seen = Seen()
        for _ in range(batches):
            self._start(int(self._rng.integers(self._count)))
            self._one(seen)
        return seen

    def _start(self, request: int) -> None:
        """A prompt of any length, then one sparse token: something is in the reference slot from now on."""
        steps, geometry = self._steps, self._steps.geometry
        size, width, chunk = geometry.block_size, geometry.table_width, geometry.prefill_buckets[-1]
        length = int(self._rng.integers(1, min(chunk, geometry.max_context - 2) + 1))

        def block(at: int) -> int:
            return request * width + at // size if at % size == 0 else -1

        tokens = self._rng.integers(steps.model.vocab_size, size=length).tolist()
        rows = [RowInput(geometry.decode_slots + at, token, at, request, block(at)) for at, token in enumerate(tokens)]
        rows[-1] = rows[-1]._replace(slot=request)
        steps.prefill(rows, [request])
        steps.decode([self._row(request, Mode.CAPTURE)._replace(block=block(length))])
        # The next position's block: what follows runs its loops again and again, and never advances.
        steps.describe([RowInput(request, block=block(length + 1))])
        steps.run("prelude", 1)

    def _row(self, request: int, mode: Mode) -> RowInput:
        lease = self._leases[request]
        return RowInput(request, mode=mode, reference_slot=lease.slot, generation=lease.generation)

    def _one(self, seen: Seen) -> None:
        steps, rng = self._steps, self._rng
        live = rng.permutation(self._count)[: int(rng.integers(1, self._count + 1))].tolist()
        modes = {slot: Mode(int(rng.integers(len(Mode)))) for slot in live}
        loops = {slot: int(rng.integers(steps.model.loops)) for slot in live}
        self._bring(modes, loops)
        batch = rng.permutation([*live, *[-1] * (self._count - len(live))]).tolist()
        before = self._snapshot()
        steps.describe([RowInput(slot) for slot in batch])
        roles = {slot: _role(modes[slot], loops[slot]) for slot in live}
        mode = steps.run_loop(self._count)
        assert (mode == "mixed") == (len(set(roles.values())) > 1), (mode, roles)
        got = self._snapshot()
        for role in dict.fromkeys(roles.values()):
            # All rows again, each of them now in this mode: sums over the same rows, so that bits can be compared.
            # Steps would refuse it, and know nothing of the state put back: the programs are run beneath them.
            self._restore(before)
            steps._dispatcher.run(ProgramKey("recurrent", self._count, role.name.lower()), self._count)
            self._compare(got, self._snapshot(), [slot for slot in live if roles[slot] is role], role, seen)
        capturing = [slot for slot, role in roles.items() if role is Mode.CAPTURE]
        self._check_untouched(before, got, [s for s in range(self._count) if s not in live], capturing)
        seen.batches += 1
        seen.mixed += mode == "mixed"
        seen.captures += mode == "mixed" and Mode.CAPTURE in roles.values()

    def _bring(self, modes: dict[int, Mode], loops: dict[int, int]) -> None:
        """Run each row up to its loop, those in one loop together."""
        steps = self._steps
        steps.describe([self._row(slot, mode) for slot, mode in modes.items()])
        steps.run("prelude", len(modes))
        for loop in range(max(loops.values())):
            for mode in Mode:
                group = [slot for slot in modes if loops[slot] > loop and modes[slot] is mode]
                if group:
                    steps.describe([RowInput(slot) for slot in group])
                    steps.run_loop(len(group))

    def _compare(self, got: Snapshot, want: Snapshot, slots: list[int], role: Mode, seen: Seen) -> None:
        """Rows of `role`: their states, keys and values, and where they captured their reference slots."""
        for name in _STORED if role is Mode.CAPTURE else ():
            stored = [self._view(snapshot, name, np.uint8)[slots] for snapshot in (got, want)]
            assert np.array_equal(stored[0], stored[1]) or not self._exact, f"{name} differs"
        for name in ("hidden", "gate_logits", "exit_probability"):
            a, b = (self._view(snapshot, name, np.float32)[slots] for snapshot in (got, want))
            if self._exact and role is Mode.CONSUME:
                assert np.array_equal(a, b, equal_nan=True), f"{name} of a consuming row differs"
            assert np.isfinite(a).all() or name != "hidden"
            seen.worst = max(seen.worst, float(np.nanmax(abs(a - b), initial=0.0)))
        blocks = [self._blocks(snapshot, slots) for snapshot in (got, want)]
        assert np.array_equal(blocks[0], blocks[1]) or not (self._exact and role is Mode.CONSUME), (
            "keys or values of a consuming row differ"
        )
        assert seen.worst <= self._limit, seen.worst

    def _check_untouched(self, before: Snapshot, got: Snapshot, slots: list[int], capturing: list[int]) -> None:
        """Rows that are not in the batch, and reference slots of rows that do not capture."""
        for name in ("hidden", "gate_logits", "exit_probability", "row_state"):
            a, b = (self._view(snapshot, name, np.uint8)[slots] for snapshot in (before, got))
            assert np.array_equal(a, b), f"{name} of a row that is not in the batch changed"
        assert np.array_equal(self._blocks(before, slots), self._blocks(got, slots))
        quiet = [slot for slot in range(self._count) if slot not in capturing]
        for name in _STORED:
            a, b = (self._view(snapshot, name, np.uint8)[quiet] for snapshot in (before, got))
            assert np.array_equal(a, b), f"{name} of a row that does not capture changed"

    def _view(self, snapshot: Snapshot, name: str, dtype: type[N]) -> NDArray[N]:
        """The buffer as one line a row: a state slot, or the reference slot of the request of that number."""
        buffer = self._steps.buffers[name]
        raw = snapshot[buffer.pool][buffer.offset : buffer.offset + buffer.bytes].view(dtype)
        lines = raw.reshape(buffer.sizes[0], -1)
        return lines[[lease.slot for lease in self._leases]] if buffer.pool is Pool.REFERENCES else lines

    def _blocks(self, snapshot: Snapshot, requests: list[int]) -> NDArray[np.uint8]:
        """Keys and values of `requests` in every plane."""
        width, planes = self._steps.geometry.table_width, self._steps.model.planes
        return snapshot[Pool.KV].reshape(planes, self._steps.kv_blocks, -1)[
            :, [r * width + i for r in requests for i in range(width)]
        ]

    def _snapshot(self) -> Snapshot:
        return {pool: self._memory.read(pool, 0, self._memory.size(pool)).copy() for pool in _POOLS}

    def _restore(self, snapshot: Snapshot) -> None:
        for pool, raw in snapshot.items():
            self._memory.write(pool, 0, raw)


def _role(mode: Mode, loop: int) -> Mode:
    """What a row of `mode` does in `loop`."""
    if mode is not Mode.CAPTURE or loop < SOURCE_LOOP:
        return mode if mode is Mode.CONSUME else Mode.DENSE
    return Mode.CAPTURE if loop == SOURCE_LOOP else Mode.CONSUME
