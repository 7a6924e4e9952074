"""Tuning: configurations of an artifact's kernels tried on the GPU that is here, inside the steps in which they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ouro_build.artifacts.errors import BuildError, UsageError
from ouro_build.artifacts.fit import fit
from ouro_build.artifacts.manifest import TargetRecord
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.tuning import FORMS, Entry, Residency, TuningTable, decode_table, encode_table
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.output import write_file
from ouro_build.builder.toolchain import find_toolchain
from ouro_build.builder.tune_bench import Refused, StepBench
from ouro_build.builder.tune_images import TriedImages
from ouro_build.builder.tune_plans import Family, StepPlans, StepRecorder, check_same_kernels
from ouro_build.builder.tune_residency import ResidencySearch
from ouro_build.builder.tune_search import Found, Search
from ouro_build.builder.tuned import check_tables
from ouro_build.kernels.sites import Site
from ouro_build.kernels.tuning import tuned
from ouro_build.runtime.bench_step import check_shape
from ouro_build.runtime.driver import Driver, open_driver
from ouro_build.runtime.machine import describe, device_record

CONTEXT = 1024
"""Tokens of a decode row where nothing else is said, or the artifact's most."""
_SHOWN_IDENTITY = 12
_FLAGS = ("--bucket", "--context")


class TunedSite(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel at one shape: `launches` of it in a step, configurations that ran and that were refused, and microseconds of
    the step that the one chosen `gained`. `changed` is (parameter, before, after)."""

    kernel: str
    sizes: tuple[int, ...]
    launches: int
    tried: int
    refused: int
    gained_us: float
    changed: tuple[tuple[str, int, int], ...]


class TunedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one bucket: microseconds before and after. `context` is that of its rows, 0 for prompt rows. Of what it gained,
    `carveout_gained_us` came from the carve-out that the sites changed together, `residency_gained_us` from what launches ask
    multiprocessors for; what single kernels gained is with them."""

    family: Family
    bucket: int
    context: int
    before_us: float
    us: float
    carveout_gained_us: float
    residency_gained_us: float
    sites: tuple[TunedSite, ...]


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a tuning found; `digest` is that of the table at `path`."""

    identity: str
    target: str
    device: str
    path: str
    digest: str
    steps: tuple[TunedStep, ...]


@dataclass(frozen=True)
class TuneOptions:
    """What to tune and with what. Empty `kernels` and `buckets` stand for all; `tables` are started from; `workers` compile."""

    cache: ImageCache
    workers: int
    kernels: Collection[str] = ()
    buckets: Collection[int] = ()
    context: int | None = None
    weights: str | None = None
    device: int = 0
    tables: Sequence[TuningTable] = ()


def tune(
    artifact: Artifact, output: Path, options: TuneOptions, say: Callable[[str], None] = lambda text: None, api: Any = None
) -> TuneResult:
    """Find faster configurations for the steps of `artifact`, and write them as a table to the file `output`.

    The table is written anew after every bucket: a device that fails takes only the bucket it was at. `say` is told of the
    progress, `api` stands in for the CUDA driver. Raises UsageError for kernels, buckets or a context that the artifact does
    not have, FitError if it does not fit, BuildError if it was built by another version, MissingExtraError without triton,
    OutputError if the table cannot be written, DeviceError if the device fails.
    """
    steps = _steps(artifact, options)
    with closing(open_driver(options.device, api)) as driver:
        return _Tuning(artifact, output, options, say, driver).run(steps)


def _steps(artifact: Artifact, options: TuneOptions) -> list[tuple[Family, int]]:
    """The steps to tune, after a look at what was asked for."""
    unknown = sorted(set(options.kernels) - FORMS.keys())
    if unknown:
        raise UsageError(f"{unknown[0]!r} has no configurations", where="--kernel", hint=f"Known: {', '.join(FORMS)}")
    geometry = artifact.manifest.geometry
    every: list[tuple[Family, int]] = [("decode", b) for b in geometry.buckets]
    every += [("prefill", b) for b in geometry.prefill_buckets]
    missing = sorted(set(options.buckets) - {bucket for _, bucket in every})
    if missing:
        known = ", ".join(str(bucket) for bucket in sorted({bucket for _, bucket in every}))
        raise UsageError(f"the artifact has no bucket {missing[0]}", where="--bucket", hint=f"It has {known}.")
    return [step for step in every if not options.buckets or step[1] in options.buckets]


class _Tuning:
    def __init__(
        self, artifact: Artifact, output: Path, options: TuneOptions, say: Callable[[str], None], driver: Driver
    ) -> None:
        self._artifact, self._output, self._options, self._say, self._driver = artifact, output, options, say, driver
        self._machine = describe(driver)
        self._target = self._chosen_target()
        check_tables(options.tables, [self._target.part])
        part, geometry = self._target.part, artifact.manifest.geometry
        self._context = min(CONTEXT, geometry.max_context) if options.context is None else options.context
        check_shape(geometry, 1, self._context, self._target.memory.kv_blocks, _FLAGS)
        self._toolchain = find_toolchain([part])
        self._images = TriedImages(part, self._toolchain, options.cache, options.workers)
        self._entries: list[Entry] = []
        self._residency: list[Residency] = []

    def run(self, steps: Sequence[tuple[Family, int]]) -> TuneResult:
        """Tune every step."""
        asked = tuned(self._target.part, tuple(self._options.tables)).tuning.records(self._target.part)
        if asked != self._target.tuning:
            names = ", ".join(record.name for record in self._target.tuning)
            self._say(
                f"the artifact was built with other tables ({names}): give the same with --tuning to start from what it is"
            )
        done, digest = [], ""
        for family, bucket in steps:
            found = self._step(family, bucket)
            if found is None:
                self._say(f"{family}, {bucket} rows: nothing to tune")
                continue
            self._entries += found.entries()
            self._residency += found.residency
            digest = self._write()
            done.append(_described(family, bucket, self._context if family == "decode" else 0, found))
        if not done:
            raise UsageError("none of the chosen kernels is in the chosen buckets", where="--kernel, --bucket")
        return TuneResult(
            identity=self._artifact.identity,
            target=self._target.part.name,
            device=self._machine.name,
            path=str(self._output),
            digest=digest,
            steps=tuple(done),
        )

    def _chosen_target(self) -> TargetRecord:
        manifest = self._artifact.manifest
        target = manifest.target(fit(manifest, self._machine).chosen.target)
        if target is None:
            raise BuildError("the chosen target is not in the manifest", where=str(self._artifact.path))
        return target

    def _step(self, family: Family, bucket: int) -> Found | None:
        model, geometry = self._artifact.manifest.model, self._artifact.manifest.geometry
        # A prompt chunk may launch what a decode step of as many rows does: that is settled then.
        settled = self._table([entry for entry in self._entries if entry.rows == bucket])
        recorder = StepRecorder(model, geometry, self._target.part, family, bucket, (settled, *self._options.tables))
        step = recorder.record({})
        check_same_kernels(self._artifact, self._target, step)
        fixed = {(e.kernel, e.bits, e.sizes) for e in settled.entries}
        open_sites = [(s, count) for s, count in step.sites().items() if (s.kernel, s.bits, s.sizes) not in fixed]
        sites = [(site, count) for site, count in open_sites if self._wanted(site)]
        if not sites:
            return None
        rows = min(bucket, geometry.max_requests)
        if family == "decode":
            check_shape(geometry, rows, self._context, self._target.memory.kv_blocks, _FLAGS)
        self._say(f"{family}, {bucket} rows: {len(sites)} places")
        self._say_spills(step)
        with ExitStack() as resources:
            bench = StepBench(
                self._artifact, self._target, recorder, self._images, self._driver, self._options.weights, self._context
            )
            resources.callback(bench.close)
            try:
                return self._search(bench, recorder, sites, whole=len(sites) == len(step.sites()))
            except Refused as refusal:
                raise BuildError(
                    f"the step as it is must not be used: {refusal}",
                    where=f"{self._artifact.path}: {family}, {bucket} rows",
                    hint="Start from another table, or from none.",
                ) from refusal

    def _search(self, bench: StepBench, recorder: StepRecorder, sites: Sequence[tuple[Site, int]], *, whole: bool) -> Found:
        """Search at `sites`; if they are the `whole` of what tables configure in the step, also for what concerns all of it."""
        asked = recorder.asked
        if whole and asked:
            self._say(f"carve-outs: none tried, tables ask for a residency of {recorder.bucket} rows, which comes before them")
        found = Search(bench, recorder.part_with({}), sites, self._say).run(carves=whole and not asked)
        found.residency = tuple(asked.values())  # the step was measured with it, and a build is given one table
        if recorder.family != "decode" or not whole:
            return found
        choice = found.choice()
        search = ResidencySearch(bench, choice, self._target.part.shared, self._say)
        return search.run(found, recorder.residency(choice))

    def _say_spills(self, step: StepPlans) -> None:
        """Say what of the step as it is spills: tables that were chosen with other versions of the compilers may have it so."""
        self._images.compile(step.index.specializations)
        most: dict[str, int] = {}
        for specialization, size in self._images.spills(step.index.specializations).items():
            most[specialization.kernel] = max(size, most.get(specialization.kernel, 0))
        if most:
            shown = ", ".join(f"{kernel} {size}" for kernel, size in sorted(most.items()))
            self._say(f"the step as it is spills ({shown} bytes a thread): it is the start, and nothing else that spills runs")

    def _wanted(self, site: Site) -> bool:
        return not self._options.kernels or site.kernel in self._options.kernels

    def _table(self, entries: Sequence[Entry], residency: Sequence[Residency] = ()) -> TuningTable:
        manifest, part = self._artifact.manifest, self._target.part
        about = f"{manifest.model.layers} layers, hidden {manifest.model.hidden_size}, {manifest.model.dtype}"
        return TuningTable(
            name=f"{part.name} {self._artifact.identity[:_SHOWN_IDENTITY]}",
            arch=part.arch,
            source=f"Measured by ouro-artifact tune in whole steps of artifact {self._artifact.identity} ({about}).",
            device=device_record(self._machine),
            toolchain=self._toolchain.packages(),
            context=self._context,
            entries=tuple(entries),
            residency=tuple(residency),
        )

    def _write(self) -> str:
        """Write all of the table so far, or leave what was there before; its digest, which is of the order in the file."""
        raw = encode_table(self._table(self._entries, self._residency))
        write_file(self._output, raw)
        return decode_table(raw, str(self._output)).digest


def _described(family: Family, bucket: int, context: int, found: Found) -> TunedStep:
    sites = []
    for place in found.places:
        first, last = place.first, place.parameters
        names = [n for n in first.__struct_fields__ if getattr(first, n) != getattr(last, n)]
        sites.append(
            TunedSite(
                kernel=place.site.kernel,
                sizes=place.site.sizes,
                launches=place.launches,
                tried=place.tried,
                refused=place.refused,
                gained_us=round(place.gained, 2),
                changed=tuple((n, getattr(first, n), getattr(last, n)) for n in names),
            )
        )
    return TunedStep(
        family=family,
        bucket=bucket,
        context=context,
        before_us=round(found.before_us, 2),
        us=round(found.us, 2),
        carveout_gained_us=round(found.carved_us, 2),
        residency_gained_us=round(found.resident_us, 2),
        sites=tuple(sites),
    )
