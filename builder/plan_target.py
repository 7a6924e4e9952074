"""What is decided before anything is compiled: the model, its programs, the memory of every part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ouro_build.artifacts.columns import Columns, LoadTimeEntry, PlanIndex, encode
from ouro_build.artifacts.errors import CheckpointError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import MemoryPlan
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import weight_buffers
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.tuning import TuningRecord, TuningTable
from ouro_build.builder.budget import plan_memory
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.checker import check
from ouro_build.builder.planner import place
from ouro_build.builder.programs import Programs
from ouro_build.builder.source import Source, open_source
from ouro_build.builder.spec import BuildSpec
from ouro_build.builder.tuned import Chosen, chosen_entries, shaped, unused_entries, unused_residency
from ouro_build.kernels import registry
from ouro_build.kernels.sites import bits_of
from ouro_build.kernels.spec import LOAD_TIME_DIVISORS
from ouro_build.kernels.tuning import tuned


@dataclass(frozen=True)
class Target:
    """What is planned for one part. `pools` are the bytes of the pools of fixed size.

    `tuning` are the tables that were asked, `chosen` what entries of the given ones shaped, `notes` what is to be said of them.
    """

    part: Part
    index: PlanIndex
    columns: Columns
    pools: dict[Pool, int]
    memory: MemoryPlan
    tuning: tuple[TuningRecord, ...]
    chosen: Chosen
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preparation:
    """A build that is known to fit, ready to be carried out."""

    spec: BuildSpec
    source: Source
    geometry: Geometry
    targets: tuple[Target, ...]


def prepare(spec: BuildSpec) -> Preparation:
    """Open the model, record its programs and plan the memory of every part. Compiles and writes nothing.

    Raises UsageError, CheckpointError or BudgetError for what cannot be built.
    """
    source = open_source(spec.model, dtype=spec.dtype, seed=spec.seed)
    outside = [i for i in source.stop_ids if i >= source.model.vocab_size]
    if outside:
        raise CheckpointError(
            f"stop ids {outside} are outside the vocabulary of {source.model.vocab_size}",
            where=f"--model {spec.model}: eos_token_id",
            hint="Correct generation_config.json or config.json.",
        )
    geometry = spec.geometry(source.model)
    targets = tuple(plan_target(source.model, geometry, part, spec.memory, spec.tuning) for part in spec.parts)
    return Preparation(spec, source, geometry, targets)


def plan_target(
    model: ModelConfig, geometry: Geometry, part: Part, memory: int | None, tables: Sequence[TuningTable] = ()
) -> Target:
    """Record the programs for `part`, place their buffers, prove the placement right and divide `memory` bytes.

    Launch rules ask those of `tables` that are for the part's architecture before the shipped one.
    Raises BudgetError if one request at full context does not fit.
    """
    buffers = make_buffers(model, geometry, weight_buffers(model))
    mine = tuple(table for table in tables if table.arch == part.arch)
    with_tables = tuned(part, mine)
    placement = place(Programs(model, geometry, with_tables, buffers).record(), buffers)
    check(placement.plans, placement.buffers, placement.pools, registry.kernel)
    load_time = [LoadTimeEntry(name, divisor) for name, divisor in LOAD_TIME_DIVISORS.items()]
    index, columns = encode(placement.plans, placement.buffers, load_time)
    divided = plan_memory(part, model, geometry, placement.plans, placement.pools, memory)
    records, found = with_tables.tuning.records(part), shaped(placement.plans, with_tables.tuning)
    chosen, notes = chosen_entries(found, mine), unused_entries(found, mine)
    notes += unused_residency(placement.plans, mine, bits_of(model.dtype))
    return Target(part, index, columns, placement.pools, divided, records, chosen, notes)
