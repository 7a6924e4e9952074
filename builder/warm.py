"""Warming: every plan of an artifact tried on the GPU that is here, checked, timed and recorded beside the artifact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ouro_build.artifacts.errors import BuildError, MissingExtraError
from ouro_build.artifacts.fit import fit
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.records import ObservedKey, ObservedRecord, encode_record
from ouro_build.builder.output import write_file
from ouro_build.runtime.device_pools import open_device_pools
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.machine import describe, device_record
from ouro_build.runtime.paths import NO_CUDA, WorkerPath, torch_has_cuda
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.reference import ReferenceExecutor
from ouro_build.runtime.scenes import blocks_needed
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.timing import median_ms, run_times
from ouro_build.runtime.trial import Trial

_BATCHES, _RUNS = 20, 5


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
        pools = open_device_pools(artifact, chosen, Loading(weights=weights), StartupClock(), driver)
        resources.callback(pools.close)
        keys = [entry.key for entry in pools.index.plans]
        seen = []
        values = load_time_values(artifact.manifest.kv, pools.kv_blocks, machine.sm_count)
        reference = ReferenceExecutor(*artifact.plans(target), pools.memory, values, device)
        resources.callback(reference.close)
        trial = Trial(artifact.manifest, pools, reference, device)
        for done, key in enumerate(keys):
            progress(done, len(keys))
            seen.append(_observe(trial, pools, key))
        progress(len(keys), len(keys))
    observed = ObservedRecord(
        identity=artifact.identity, target=target.part.name, device=device_record(machine), keys=tuple(seen)
    )
    write_file(record / f"{target.part.name}.json", encode_record(observed))
    _refuse_bad(seen, artifact.path)
    return observed


def _observe(trial: Trial, pools: Pools, key: ProgramKey) -> ObservedKey:
    """Compare `key` in every arrangement of live rows, then time it in the last."""
    found = trial.compare(key)
    times = {e.name: _time(pools, e, key) for e in pools.executors if e.has(key)}
    return ObservedKey(
        program=key.program,
        bucket=key.bucket,
        mode=key.mode,
        variant=key.variant,
        patterns=found.patterns,
        bit_equal=found.bit_equal if "graph" in times else None,
        error=found.error,
        graph_us=times.get("graph"),
        launch_us=times.get("launch"),
    )


def _time(pools: Pools, executor: Executor, key: ProgramKey) -> float:
    """Microseconds a run, the median of several batches of runs."""
    took = run_times(lambda: executor.run(key), pools.memory.synchronize, _BATCHES, _RUNS)
    return round(median_ms(took) * 1e3, 1)


def _refuse_bad(seen: list[ObservedKey], path: Path) -> None:
    bad = [k for k in seen if k.bit_equal is False or (k.error or 0.0) > 1.0]
    if bad:
        lines = [f"{k.program}/{k.bucket}/{k.mode}: bit_equal={k.bit_equal}, error={k.error} tolerances" for k in bad]
        raise BuildError(
            "plans that are not right on this device:\n  " + "\n  ".join(lines),
            where=str(path),
            hint="Do not deploy the artifact on this GPU, and please report it.",
        )
