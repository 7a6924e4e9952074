"""Start-up measured: fresh processes, cold and warm, from the moment the parent starts them to their first token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from ouro_build.artifacts.bench_records import PhaseSummary, StartupBenchRecord
from ouro_build.artifacts.errors import ArtifactError, DeviceError, FitError, OuroError, UsageError
from ouro_build.artifacts.manifest import MANIFEST
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.records import PhaseRecord, StartupRecord, decode_record
from ouro_build.runtime.baseline import check_baseline
from ouro_build.runtime.first_requests import first_requests
from ouro_build.runtime.loading import Verification
from ouro_build.runtime.machine import device_record, probe
from ouro_build.runtime.page_cache import Dropped, drop, resident_share
from ouro_build.runtime.paths import Choice, choose_path
from ouro_build.runtime.sample_text import SampleText
from ouro_build.runtime.startup import TIME_ZERO
from ouro_build.runtime.timing import percentiles
from ouro_build.runtime.worker import load

PROMPT = 16
"""Tokens of the prompt that every run continues by one."""
PERCENTILES = (10, 25, 50, 75, 90, 99)
_WORKER = "ouro_build.runtime.entry"
_TORCH = "ouro_build.runtime.torch_startup"
_FAILURES: dict[int, type[OuroError]] = {2: UsageError, 3: FitError, 4: ArtifactError}


@dataclass(frozen=True)
class Iterations:
    """Runs of each kind; at least one cold and one warm."""

    cold: int = 3
    warmup: int = 1
    warm: int = 3


def bench_startup(
    artifact: Artifact,
    iterations: Iterations,
    *,
    executor: Choice = "auto",
    weights: str | None = None,
    device: int = 0,
    verify: Verification = "full",
    baseline: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> StartupBenchRecord:
    """Start workers of `artifact`, and with `baseline` as many of torch as warm ones; then see what first requests cost.

    `say` is told what is being done. Raises FitError if the artifact does not fit, UsageError or MissingExtraError if the
    baseline cannot run here, and what a worker failed of if one does.
    """
    machine = probe(device)
    path = choose_path(artifact.manifest, machine, executor, None)
    if baseline:
        check_baseline(path)
    with TemporaryDirectory(prefix="ouro-bench-") as folder:
        starts = _Starts(artifact, Path(folder), executor, weights, device, verify)
        cold, dropped, resident = _cold(starts, iterations.cold, say)
        for run in range(iterations.warmup + iterations.warm):
            say(f"warm start {run + 1 - iterations.warmup} of {iterations.warm}" if run >= iterations.warmup else "warming up")
            starts.worker()
        warm = starts.records[iterations.cold + iterations.warmup :]
        torch = []
        for run in range(iterations.warm if baseline else 0):
            say(f"torch, start {run + 1} of {iterations.warm}")
            torch.append(starts.torch())
    say("first requests of every shape")
    with load(artifact.path, executor=executor, weights=weights, device=device, verify=verify) as worker:
        first, notes = first_requests(worker.steps), worker.notes
    return StartupBenchRecord(
        identity=artifact.identity,
        executor=path.executor,
        device=device_record(machine) if path.on_device else None,
        verify=verify,
        prompt_tokens=PROMPT,
        avg_cold_startup_time=fmean(_walls(cold)),
        cold_startup_times=_walls(cold),
        cold_startup_percentiles=percentiles(_walls(cold), PERCENTILES),
        avg_warm_startup_time=fmean(_walls(warm)),
        warm_startup_times=_walls(warm),
        warm_startup_percentiles=percentiles(_walls(warm), PERCENTILES),
        cold_by=dropped,
        cold_resident=resident,
        accounted=min(r.accounted for r in warm),
        graphs=warm[-1].graphs,
        nodes=warm[-1].nodes,
        graphs_ms=median(_seconds(r, "graphs") for r in warm) * 1e3,
        node_us=median(r.node_us or 0.0 for r in warm) if warm[-1].nodes else None,
        phases=_summaries(warm),
        first_requests=first,
        cold=tuple(cold),
        warm=tuple(warm),
        baseline=tuple(torch),
        notes=notes,
    )


class _Starts:
    """Fresh processes over one artifact; `records` of the workers among them."""

    def __init__(
        self, artifact: Artifact, folder: Path, executor: Choice, weights: str | None, device: int, verify: Verification
    ) -> None:
        self.artifact, self._folder = artifact, folder
        self._device, self._weights = str(device), weights
        prompts = folder / "prompts.json"
        prompts.write_text(json.dumps([SampleText(artifact.manifest.model.vocab_size).prompt(0, PROMPT)]))
        self._out = folder / "startup.json"
        self._run = [
            "run",
            str(artifact.path),
            "--prompt-ids",
            str(prompts),
            "--max-tokens",
            "1",
            "--startup-out",
            str(self._out),
        ]
        self._run += ["--executor", executor, "--verify", verify, "--device", self._device]
        self._run += [] if weights is None else ["--weights", weights]
        self.records: list[StartupRecord] = []

    @property
    def files(self) -> list[Path]:
        """Every file of the artifact."""
        return [self.artifact.path / name for name in (MANIFEST, *(f.path for f in self.artifact.manifest.files))]

    def worker(self) -> StartupRecord:
        """Start a worker. Raises what it failed of."""
        self.records.append(self._started(_WORKER, self._run))
        return self.records[-1]

    def torch(self) -> StartupRecord:
        """Start a worker of torch. Raises DeviceError if it fails."""
        weights = [] if self._weights is None else [self._weights]
        return self._started(_TORCH, [str(self.artifact.path), self._device, str(self._out), *weights])

    def _started(self, module: str, arguments: Sequence[str]) -> StartupRecord:
        self._out.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", module, *arguments]
        environment = {**os.environ, TIME_ZERO: repr(time.monotonic())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().removeprefix("error: ")
            raise _FAILURES.get(done.returncode, DeviceError)(said or f"ended with {done.returncode}", where=module)
        try:
            return decode_record(self._out.read_bytes(), StartupRecord, module)
        except (OSError, UsageError) as error:  # the worker wrote it, not who asked
            raise DeviceError(f"ended without a record that can be read: {error}", where=module) from error


def _cold(starts: _Starts, count: int, say: Callable[[str], None]) -> tuple[list[StartupRecord], Dropped, float]:
    """The cold runs, how files were put out of memory, and the largest share of them that stayed."""
    dropped: Dropped = "fadvise"
    resident = 0.0
    for run in range(count):
        say(f"cold start {run + 1} of {count}")
        dropped = drop(starts.files)
        resident = max(resident, resident_share(starts.files))
        starts.worker()
    return list(starts.records), dropped, resident


def _walls(records: Sequence[StartupRecord]) -> tuple[float, ...]:
    return tuple(r.wall_s for r in records)


def _seconds(record: StartupRecord, name: str) -> float:
    return sum(p.seconds for p in record.phases if p.name == name)


def _summaries(records: Sequence[StartupRecord]) -> tuple[PhaseSummary, ...]:
    """Medians of every phase that all of `records` have, in the order of the last."""
    found = [{p.name: p for p in record.phases} for record in records]
    return tuple(_summary([phases[name] for phases in found]) for name in found[-1] if all(name in phases for phases in found))


def _summary(seen: Sequence[PhaseRecord]) -> PhaseSummary:
    last, seconds = seen[-1], median(p.seconds for p in seen)
    return PhaseSummary(
        name=last.name,
        parent=last.parent,
        beside=last.beside,
        start_s=median(p.start_s for p in seen),
        seconds=seconds,
        bytes=last.bytes,
        rate=last.bytes / seconds if last.bytes and seconds else None,
    )
