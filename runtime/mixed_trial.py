"""Trying `mixed` in made-up states against the programs of single modes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.artifacts.rows import SOURCE_LOOP, Mode, Row
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.row_modes import MIXED, NO_CAPTURE
from ouro_build.runtime.scenes import Scene, live_patterns
from ouro_build.runtime.trial import Compared

Snapshot = dict[Pool, NDArray[np.uint8]]
"""The bytes of some pools."""
_STATE = ("hidden", "gate_logits", "exit_probability")
_STORED = ("reference_records", "reference_mass", "reference_keys", "reference_output", "reference_contribution")


class MixedTrial:
    """Runs `mixed` over `pools`, then each single mode in the very same state, and compares row for row, bit for bit."""

    def __init__(self, manifest: Manifest, pools: Pools) -> None:
        self._manifest, self._pools = manifest, pools
        self._buffers = {b.name: b for b in pools.index.buffers}

    def compare(self, bucket: int, variant: str = "") -> Compared:
        """Every arrangement of live rows. Raises DeviceError if a program cannot be run."""
        key = ProgramKey("recurrent", bucket, MIXED, variant)
        executors = [e for e in self._pools.executors if e.has(key)]
        patterns = live_patterns(bucket)
        equal = all(self._equal(executor, key, live) for executor in executors for live in patterns)
        return Compared(len(patterns), tuple(e.name for e in executors), equal, None)

    def _equal(self, executor: Executor, key: ProgramKey, live: tuple[bool, ...]) -> bool:
        scene = Scene(self._manifest.model, self._manifest.geometry, key, live, self._pools.kv_blocks)
        before, got = self._run(scene, executor, key)
        slots = scene.slots
        state = self._view(before, "row_state").view(np.int32)[slots]
        roles = _roles(state, captures=key.variant != NO_CAPTURE)
        equal = True
        for role in Mode:
            rows = roles == role
            if not rows.any():
                continue
            want = self._run(scene, executor, ProgramKey("recurrent", key.bucket, role.name.lower()))[1]
            equal &= self._same(_STATE, got, want, slots[rows])
            if role is Mode.CAPTURE:
                named = state[rows, Row.REFERENCE_SLOT]
                inside = (named >= 0) & (named < self._manifest.geometry.reference_slots)
                equal &= self._same(_STORED, got, want, named[inside])
        return equal

    def _run(self, scene: Scene, executor: Executor, key: ProgramKey) -> tuple[Snapshot, Snapshot]:
        memory = self._pools.memory
        scene.write(memory, self._buffers)
        before = {Pool.STATE: memory.read(Pool.STATE, 0, memory.size(Pool.STATE))}
        executor.run(key)
        return before, {pool: memory.read(pool, 0, memory.size(pool)) for pool in (Pool.STATE, Pool.REFERENCES)}

    def _same(self, names: tuple[str, ...], a: Snapshot, b: Snapshot, lines: NDArray[np.integer]) -> bool:
        present = [name for name in names if name in self._buffers]
        return all(np.array_equal(self._view(a, n)[lines], self._view(b, n)[lines]) for n in present)

    def _view(self, snapshot: Snapshot, name: str) -> NDArray[np.uint8]:
        """The buffer's bytes, one line a slot."""
        buffer: Buffer = self._buffers[name]
        raw = snapshot[buffer.pool][buffer.offset : buffer.offset + buffer.bytes]
        return raw.reshape(buffer.sizes[0], -1)


def _roles(state: NDArray[np.int32], *, captures: bool) -> NDArray[np.int64]:
    """What each row does in a mixed program, as `Mode`."""
    mode, loop = state[:, Row.MODE], state[:, Row.LOOP]
    roles = np.full(len(state), int(Mode.DENSE))
    roles[(mode == Mode.CONSUME) | ((mode == Mode.CAPTURE) & (loop > SOURCE_LOOP))] = Mode.CONSUME
    if captures:
        roles[(mode == Mode.CAPTURE) & (loop == SOURCE_LOOP)] = Mode.CAPTURE
    return roles
