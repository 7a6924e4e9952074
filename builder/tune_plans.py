"""A whole step of one bucket as plans, with launch rules that ask given tables: what tuning exchanges kernels in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec

from ouro_build.artifacts.columns import Columns, GraphEntry, GraphStep, LoadTimeEntry, PlanIndex, decode_plan, encode
from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import Manifest, TargetRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import weight_buffers
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Launch, Plan, Pool, ProgramKey
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.tuning import Entry, Parameters, Residency, TuningTable
from ouro_build.builder.buffers import Buffers, make_buffers
from ouro_build.builder.planner import place
from ouro_build.builder.programs import Programs
from ouro_build.builder.record import residency_key, takes_residency
from ouro_build.kernels.sites import Site, bits_of, site_of
from ouro_build.kernels.spec import LOAD_TIME_DIVISORS
from ouro_build.kernels.tuning import NO_RESIDENCY, Residencies, TunedPart, tuned

Family = Literal["decode", "prefill"]
Choice = Mapping[Site, Parameters]
"""Configurations at some sites; elsewhere tables decide."""
Asked = tuple[Residency, ...]
"""What launches ask multiprocessors for; where it is empty, tables decide."""

PROGRAMS: Mapping[Family, tuple[str, ...]] = {"decode": ("prelude", "recurrent", "coda"), "prefill": ("prelude", "prefill")}
_LOOPED = ("recurrent", "prefill")


@dataclass(frozen=True)
class StepPlans:
    """A step's plans, encoded, with two graphs: `whole` runs every loop, `short` one loop. `workspace` bytes are needed."""

    index: PlanIndex
    columns: Columns
    plans: tuple[Plan, ...]
    whole: ProgramKey
    short: ProgramKey
    workspace: int

    def sites(self) -> dict[Site, int]:
        """The places that tables configure, with the launches of each in a run of every plan."""
        found = Counter(site for plan in self.plans for launch in plan.launches if (site := site_of(launch)) is not None)
        return dict(sorted(found.items()))


class StepRecorder:
    """Records steps of a `family` for `bucket` rows of a model on a part. `tables` are asked before the shipped one."""

    def __init__(
        self,
        model: ModelConfig,
        geometry: Geometry,
        part: Part,
        family: Family,
        bucket: int,
        tables: Sequence[TuningTable] = (),
    ) -> None:
        self.model, self.geometry, self.part = model, geometry, part
        self.family, self.bucket = family, bucket
        self._tables = tuple(tables)
        self._buffers: Buffers = make_buffers(model, geometry, weight_buffers(model))

    def part_with(self, choice: Choice, residency: Asked = ()) -> TunedPart:
        """The part with `choice` and `residency`, or what tables have instead of none, asked before all tables."""
        entries = tuple(
            Entry(kernel=s.kernel, bits=s.bits, rows=s.rows, sizes=s.sizes, parameters=p) for s, p in choice.items()
        )
        arch = self.part.arch
        asked = residency or tuple(self.asked.values())
        chosen = TuningTable(name="tried", arch=arch, source="being tried", entries=entries, residency=asked)
        return tuned(self.part, (chosen, *self._tables))

    def record(self, choice: Choice, residency: Asked = ()) -> StepPlans:
        """The step with `choice` and `residency`."""
        programs = Programs(self.model, self.geometry, self.part_with(choice, residency), self._buffers)
        names = PROGRAMS[self.family]
        placement = place([getattr(programs, name)(self.bucket) for name in names], self._buffers)
        load_time = [LoadTimeEntry(name, divisor) for name, divisor in LOAD_TIME_DIVISORS.items()]
        index, columns = encode(placement.plans, placement.buffers, load_time)
        whole, short = ProgramKey("step", self.bucket), ProgramKey("short_step", self.bucket)
        loops = {whole: self.model.loops, short: 1}
        graphs = tuple(
            GraphEntry(key, tuple(GraphStep(at, times if name in _LOOPED else 1) for at, name in enumerate(names)))
            for key, times in loops.items()
        )
        graphed = msgspec.structs.replace(index, graphs=graphs)
        return StepPlans(graphed, columns, placement.plans, whole, short, placement.pools[Pool.WORKSPACE])

    @cached_property
    def asked(self) -> Residencies:
        """What tables ask for launches of the step; nothing for a prompt chunk, whose programs do not ask them."""
        if self.family != "decode":
            return NO_RESIDENCY
        part = tuned(self.part, self._tables)
        return Programs(self.model, self.geometry, part, self._buffers).residency(self.bucket)

    def residency(self, choice: Choice) -> Residencies:
        """What launches of a step with `choice` have of what tables may ask for, whether any table does; of launches that
        tables cannot tell apart, what the first has."""
        found: dict[tuple[str, str], Residency] = {}
        for plan in filter(lambda plan: takes_residency(plan.key), self.record(choice).plans):
            for launch in plan.launches:
                residency = self._residency(launch)
                found.setdefault((residency.kernel, residency.kind), residency)
        return dict(sorted(found.items()))

    def _residency(self, launch: Launch) -> Residency:
        (kernel, kind), options = residency_key(launch), launch.specialization.options
        return Residency(
            kernel=kernel,
            bits=bits_of(self.model.dtype),
            rows=self.bucket,
            kind=kind,
            carveout=options.carveout,
            shared=options.shared,
        )


def check_same_kernels(artifact: Artifact, target: TargetRecord, step: StepPlans) -> None:
    """Raise BuildError unless the artifact's own plans launch the kernels that `step` does, over weights at the same places.

    An artifact of another version of ouro-build has others: what is measured would not be what it runs.
    """
    index, columns = artifact.plans(target)
    entries = {entry.key: entry for entry in index.plans}
    for plan in step.plans:
        entry = entries.get(plan.key)
        own = () if entry is None else _kernels(decode_plan(index, columns, entry))
        if own != _kernels(plan):
            raise _other_version(artifact, f"its {plan.key} launches other kernels than this version of ouro-build records")
    if _places(artifact.manifest) != {name: b.offset for name, b in weight_buffers(artifact.manifest.model).items()}:
        raise _other_version(artifact, "its weights lie at other places than this version of ouro-build gives them")


def _kernels(plan: Plan) -> tuple[tuple[str, int], ...]:
    return tuple((launch.specialization.kernel, launch.specialization.contract) for launch in plan.launches)


def _places(manifest: Manifest) -> dict[str, int]:
    found = {t.name: t.offset for t in manifest.weights.tensors}
    found.setdefault("lm_head", found["embedding"])
    return found


def _other_version(artifact: Artifact, what: str) -> BuildError:
    return BuildError(what, where=str(artifact.path), hint="Build it again with this version, and tune that.")
