"""Warming: every plan of an artifact tried on the GPU that is here, checked, timed and recorded beside the artifact."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import BuildError, MissingExtraError
from ouro_build.artifacts.fit import Machine, fit
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.records import DeviceRecord, ObservedKey, ObservedRecord, encode_record
from ouro_build.builder.scenes import Scene, blocks_needed, live_patterns
from ouro_build.runtime.device_pools import open_device_pools
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.machine import describe
from ouro_build.runtime.paths import NO_CUDA, WorkerPath, torch_has_cuda
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.reference import ReferenceExecutor
from ouro_build.runtime.startup import StartupClock

# A program is hundreds of kernels deep, and in bfloat16 each rounds its outputs to 8 bits: two right executions differ by the
# random sum of those roundings, some units in a row's last place. float32 leaves only the order of sums.
TOLERANCE = {"bfloat16": 0.04, "float32": 1e-4}
"""How far a written row may lie from the reference's, as a share of its length (see `_buffer_difference`)."""
_SMALLEST = 1e-30
_TIMED = 20
_COMPARED = (Pool.KV, Pool.STATE, Pool.IO)
Snapshot = dict[Pool, NDArray[np.uint8]]


def warm(
    artifact: Artifact,
    record: Path,
    *,
    weights: str | None = None,
    device: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ObservedRecord:
    """Try every plan of `artifact` on `device` by graph, launch and reference; write what was seen to the folder `record`.

    `progress(done, total)` is told of each key. Raises FitError if the artifact does not fit, MissingExtraError if torch has
    no CUDA here, BuildError naming the keys whose graph and launches differ in a bit, or that differ from the reference by
    more than the tolerance.
    """
    with ExitStack() as resources:
        driver = open_driver(device)
        resources.callback(driver.close)
        if not torch_has_cuda():
            raise MissingExtraError(
                f"{NO_CUDA}, and warming compares with the reference there", hint="Install torch with CUDA."
            )
        machine = describe(driver)
        target = artifact.manifest.target(fit(artifact.manifest, machine).chosen.target)
        if target is None:
            raise BuildError("the chosen target is not in the manifest", where=str(artifact.path))
        chosen = WorkerPath(target, True, "graph", None, blocks_needed(artifact.manifest.geometry), ())
        pools = open_device_pools(artifact, chosen, weights, StartupClock(), driver)
        resources.callback(pools.close)
        keys = [entry.key for entry in pools.index.plans]
        seen = []
        trial = _Trial(artifact, chosen, pools, machine, device)
        for done, key in enumerate(keys):
            progress(done, len(keys))
            seen.append(trial.observe(key))
        progress(len(keys), len(keys))
    observed = ObservedRecord(identity=artifact.identity, target=target.part.name, device=_device(machine), keys=tuple(seen))
    _write(record / f"{target.part.name}.json", encode_record(observed))
    _refuse_bad(seen, artifact.path)
    return observed


class _Trial:
    def __init__(self, artifact: Artifact, path: WorkerPath, pools: Pools, machine: Machine, device: int) -> None:
        self._manifest, self._pools = artifact.manifest, pools
        self._buffers = {b.name: b for b in pools.index.buffers}
        self._kv_blocks = path.kv_blocks
        values = load_time_values(self._manifest.kv, path.kv_blocks, machine.sm_count)
        index, columns = artifact.plans(path.target)
        self._reference = ReferenceExecutor(index, columns, pools.memory, values, device)
        self._graph, self._launch = pools.executors

    def observe(self, key: ProgramKey) -> ObservedKey:
        """Run `key` in every arrangement of live rows, then time it in the last."""
        equal, error = True, 0.0
        patterns = live_patterns(key.bucket)
        has_graph = self._graph.has(key)
        for live in patterns:
            scene = Scene(self._manifest.model, self._manifest.geometry, key, live, self._kv_blocks)
            before, launched = self._run(scene, self._launch, key)
            if has_graph:
                replayed = self._run(scene, self._graph, key)[1]
                equal &= all(np.array_equal(launched[pool], replayed[pool]) for pool in launched)
            wanted = self._run(scene, self._reference, key)[1]
            error = max(error, self._difference(before, launched, wanted))
        return ObservedKey(
            program=key.program,
            bucket=key.bucket,
            mode=key.mode,
            variant=key.variant,
            patterns=len(patterns),
            bit_equal=equal if has_graph else None,
            error=error,
            graph_us=self._time(self._graph, key) if has_graph else None,
            launch_us=self._time(self._launch, key),
        )

    def _run(self, scene: Scene, executor: Executor, key: ProgramKey) -> tuple[Snapshot, Snapshot]:
        scene.write(self._pools.memory, self._buffers)
        before = self._snapshot()
        executor.run(key)
        return before, self._snapshot()

    def _snapshot(self) -> Snapshot:
        memory = self._pools.memory
        return {pool: memory.read(pool, 0, memory.size(pool)) for pool in _COMPARED}

    def _difference(self, before: Snapshot, got: Snapshot, wanted: Snapshot) -> float:
        """The largest difference from the reference over all buffers, in tolerances; infinite where integers differ."""
        worst = 0.0
        for buffer in self._buffers.values():
            if buffer.pool in _COMPARED:
                rows = [_rows(buffer, s[buffer.pool]) for s in (before, got, wanted)]
                worst = max(worst, _buffer_difference(buffer, *rows) / TOLERANCE[self._manifest.model.dtype])
        return worst

    def _time(self, executor: Executor, key: ProgramKey) -> float:
        """Microseconds a run, the median of several batches of runs."""
        took = []
        for _ in range(_TIMED):
            self._pools.memory.synchronize()
            began = time.perf_counter()
            for _ in range(5):
                executor.run(key)
            self._pools.memory.synchronize()
            took.append((time.perf_counter() - began) / 5)
        return round(float(np.median(took)) * 1e6, 1)


def _rows(buffer: Buffer, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The buffer's bytes, one line for each of its last dimension."""
    size = buffer.bytes or len(raw)  # a buffer of a load-time size fills its pool
    width = DTYPES[buffer.dtype].bytes * int(buffer.shape[-1] if isinstance(buffer.shape[-1], int) else 1)
    return raw[buffer.offset : buffer.offset + size].reshape(-1, width)


def _buffer_difference(buffer: Buffer, before: NDArray[np.uint8], got: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> float:
    """Over the rows that either execution wrote: the largest |got - wanted| / |wanted|, in Euclidean lengths.

    A row much shorter than the buffer's others, such as a value vector that almost cancels out, carries the rounding of longer
    vectors: its difference is taken as a share of the median length.
    """
    written = ((got != before) | (wanted != before)).any(1)
    got, wanted = got[written], wanted[written]
    if not len(got) or np.array_equal(got, wanted):
        return 0.0
    if buffer.dtype not in ("bfloat16", "float32"):
        return float("inf")
    a, b = _floats(buffer.dtype, got), _floats(buffer.dtype, wanted)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    lengths, off = _lengths(b), _lengths(a - b)
    return float(np.max(off / np.maximum(lengths, max(float(np.median(lengths)), _SMALLEST))))


def _lengths(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Euclidean length of every row; values that nobody wrote are still poison and count as none."""
    length: NDArray[np.float64] = np.sqrt(np.nansum(np.square(rows, dtype=np.float64), axis=1))
    return length


def _floats(dtype: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    if dtype == "float32":
        return raw.view(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _device(machine: Machine) -> DeviceRecord:
    return DeviceRecord(
        name=machine.name,
        capability=machine.capability,
        sm_count=machine.sm_count,
        memory=machine.memory_total,
        cuda=machine.cuda or (0, 0),
    )


def _refuse_bad(seen: list[ObservedKey], path: Path) -> None:
    bad = [k for k in seen if k.bit_equal is False or (k.error or 0.0) > 1.0]
    if bad:
        lines = [f"{k.program}/{k.bucket}/{k.mode}: bit_equal={k.bit_equal}, error={k.error} tolerances" for k in bad]
        raise BuildError(
            "plans that are not right on this device:\n  " + "\n  ".join(lines),
            where=str(path),
            hint="Do not deploy the artifact on this GPU, and please report it.",
        )


def _write(path: Path, data: bytes) -> None:
    """All of the record or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
