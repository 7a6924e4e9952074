"""Steps that are tried, on a device: the same state for all, results held against the first, then timed as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.dtypes import DTYPES
from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.manifest import TargetRecord
from ouro_build.artifacts.plan import Buffer, Pool, ProgramKey
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.tuning import Parameters
from ouro_build.builder.assemble import image_record
from ouro_build.builder.tune_images import TriedImages
from ouro_build.builder.tune_plans import Asked, Choice, StepPlans, StepRecorder
from ouro_build.kernels.sites import Site
from ouro_build.runtime.bench_step import DecodeStep, blocks_of
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.device_pools import fill_weights
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.graph import GraphExecutor
from ouro_build.runtime.images import Images
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.machine import describe
from ouro_build.runtime.pools import Pools, pool_sizes
from ouro_build.runtime.relocate import RelocatedPlans
from ouro_build.runtime.scenes import POISON, Scene, blocks_needed
from ouro_build.runtime.snapshots import parts_of
from ouro_build.runtime.timing import measure
from ouro_build.runtime.trial import TOLERANCE, line_difference

_WORKSPACES = 4  # a candidate may need more workspace than the first step does, up to this many times
_COMPARED = (Pool.STATE, Pool.IO)
_RESULTS = ("hidden", "gate_logits", "exit_probability", "logits")
_PROGRAMS = 2  # a short step is two programs that round: a loop and the LM head, each with a tolerance of its own


Snapshot = dict[Pool, NDArray[np.uint8]]
"""The bytes of some pools."""


class Refused(Exception):
    """A step that must not be used, and why."""


class StepBench:
    """Measures steps of `recorder` with the weights of `artifact` on an open device.

    Decode rows have `context` tokens each, over random keys and values; prompt rows are those of a made-up scene. `close` gives
    the memory back.
    """

    def __init__(
        self,
        artifact: Artifact,
        target: TargetRecord,
        recorder: StepRecorder,
        images: TriedImages,
        driver: Driver,
        weights: str | None,
        context: int,
    ) -> None:
        self._recorder, self._images, self._driver = recorder, images, driver
        model, geometry = recorder.model, recorder.geometry
        self.rows = min(recorder.bucket, geometry.max_requests) if recorder.family == "decode" else recorder.bucket
        self.context = context
        step = recorder.record({})
        self._first = frozenset(step.index.specializations)
        blocks = self.rows * blocks_of(geometry, context) if recorder.family == "decode" else blocks_needed(geometry)
        self._values = load_time_values(artifact.manifest.kv, blocks, describe(driver).sm_count)
        sizes = pool_sizes(target.memory, blocks) | {Pool.WORKSPACE: _WORKSPACES * step.workspace}
        self._buffers = {b.name: b for b in step.index.buffers if b.pool is not Pool.WORKSPACE}
        with ExitStack() as resources:
            self._memory = DeviceMemory(driver, sizes)
            resources.callback(self._memory.close)
            fill_weights(artifact, weights, self._memory)
            self._write_state(step, blocks)
            self._resources = resources.pop_all()
        self._dtype = model.dtype
        self._wanted: Snapshot | None = None
        self._steps: dict[tuple[frozenset[tuple[Site, Parameters]], Asked], StepPlans] = {}

    def close(self) -> None:
        """Give everything on the device back."""
        self._resources.close()

    def compile(self, choices: list[Choice], residency: Asked = ()) -> None:
        """Record steps with `choices`, each with `residency`, and compile what they need at once."""
        self._steps = {_key(choice, residency): self._recorder.record(choice, residency) for choice in choices}
        self._images.compile(s for step in self._steps.values() for s in step.index.specializations)

    def microseconds(self, choice: Choice, hopeless: float = math.inf, residency: Asked = ()) -> float:
        """The median time of a step with `choice` and `residency`, after its results were found right; of few runs if it takes
        longer than `hopeless` microseconds.

        The first step that is measured is what others are held against. Raises Refused for a step with images that exceed a
        limit, or spill and are not of the step that tables choose, that needs too much workspace, of which two runs leave
        different states, or that leaves another state than the first.
        """
        step = self._steps.get(_key(choice, residency)) or self._recorder.record(choice, residency)
        with self._loaded(step) as executor:
            self._check(executor, step.short)
            run = partial(executor.run, step.whole)
            return median(measure(run, self._memory.synchronize, hopeless / 1e6)) * 1e6

    @contextmanager
    def _loaded(self, step: StepPlans) -> Iterator[GraphExecutor]:
        specializations = step.index.specializations
        reason = self._images.refusal(specializations, self._first)
        if not reason and step.workspace > self._memory.size(Pool.WORKSPACE):
            reason = f"it needs {step.workspace} bytes of workspace, there are {self._memory.size(Pool.WORKSPACE)}"
        if reason:
            raise Refused(reason)
        made = self._images.images(specializations)
        records = [image_record(str(at), s, i) for at, (s, i) in enumerate(zip(specializations, made, strict=True))]
        with ExitStack() as resources:
            loaded = Images(self._driver, records, specializations, lambda path: made[int(path)].cubin)
            resources.callback(loaded.close)
            plans = RelocatedPlans(step.index, step.columns, self._memory, self._values)
            executor = GraphExecutor(self._memory, plans, loaded.kernels)
            resources.callback(executor.close)
            resources.callback(self._driver.release, "cuStreamSynchronize", self._memory.stream)
            for error in executor.failures.values():
                raise DeviceError(error.what, where=error.where, hint=error.hint)
            yield executor

    def _check(self, executor: GraphExecutor, key: ProgramKey) -> None:
        before, got = self._outcome(executor, key)
        _, again = self._outcome(executor, key)
        if any(not np.array_equal(got[pool], again[pool]) for pool in got):
            raise Refused("two runs leave different bits")
        if self._wanted is None:
            self._wanted = got
        lines = (_written(buffer, before, got, self._wanted) for buffer in self._buffers.values() if buffer.pool in got)
        error = max(line_difference(dtype, *pair) for dtype, pair in lines) / TOLERANCE[self._dtype]
        if error > _PROGRAMS:
            raise Refused(f"its results differ by {error:.3g} tolerances")

    def _outcome(self, executor: GraphExecutor, key: ProgramKey) -> tuple[Snapshot, Snapshot]:
        """What a run finds and what it leaves; results of runs before it are overwritten, so that none passes for its own."""
        memory = self._memory
        memory.fill(Pool.WORKSPACE, POISON)
        for name in _RESULTS:
            buffer = self._buffers[name]
            memory.write(buffer.pool, buffer.offset, np.full(buffer.bytes, POISON, np.uint8))
        before = self._snapshot()
        executor.run(key)
        return before, self._snapshot()

    def _snapshot(self) -> Snapshot:
        return {pool: self._memory.read(pool, 0, self._memory.size(pool)) for pool in _COMPARED}

    def _write_state(self, step: StepPlans, blocks: int) -> None:
        r = self._recorder
        if r.family == "prefill":
            scene = Scene(r.model, r.geometry, ProgramKey("prefill", r.bucket), (True,) * r.bucket, blocks)
            scene.write(self._memory, self._buffers)
            return
        pools = Pools(step.index, self._memory, blocks, (), {}, lambda: None)
        DecodeStep(r.model, r.geometry, pools, self.rows, self.context, varied=True)


def _key(choice: Choice, residency: Asked) -> tuple[frozenset[tuple[Site, Parameters]], Asked]:
    return frozenset(choice.items()), residency


def _written(
    buffer: Buffer, before: Snapshot, got: Snapshot, wanted: Snapshot
) -> tuple[str, tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]]:
    """The lines of the buffer's last dimension that either of two runs wrote, of both, and their parts; with their type."""
    width = DTYPES[buffer.dtype].bytes * buffer.sizes[-1]
    part = slice(buffer.offset, buffer.offset + buffer.bytes)
    old, a, b = (s[buffer.pool][part].reshape(-1, width) for s in (before, got, wanted))
    which = ((a != old) | (b != old)).any(1)
    return buffer.dtype, (a[which], b[which], parts_of(buffer, which))
