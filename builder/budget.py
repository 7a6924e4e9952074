"""How a worker's memory is divided: a reserve for what CUDA takes itself, the fixed pools, and the KV pool with the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ouro_build.artifacts.errors import BudgetError
from ouro_build.artifacts.fit import CONTEXT_BYTES
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import MemoryPlan, PoolRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Plan, Pool
from ouro_build.artifacts.references import slot_arithmetic

MIB = 1 << 20
# What CUDA takes beside the context, above what was measured. That was on an H200 alone; other parts are taken to need no more.
IMAGE_BYTES = 128 << 10  # a loaded image; measured: 64 of them took 4 MiB
NODE_BYTES = 8 << 10  # a kernel node of an uploaded graph; measured: 41 graphs of 2,187 nodes together took 10 MiB
# Of a part's nominal memory this share is left alone where --memory is not given: ECC takes a sixteenth of GDDR memory,
# and the driver and a display take some more.
UNPLANNED_SHARE = 12


def default_budget(part: Part) -> int:
    """Bytes that a worker may hold on `part` where nothing else is said: its memory less the unplanned share."""
    return (part.memory - part.memory // UNPLANNED_SHARE) // MIB * MIB


def reserve(plans: Sequence[Plan]) -> int:
    """Bytes estimated for the CUDA context, the images and the graphs of `plans`."""
    images = len({launch.specialization for plan in plans for launch in plan.launches})
    nodes = sum(len(plan.launches) for plan in plans)
    return -(-(CONTEXT_BYTES + images * IMAGE_BYTES + nodes * NODE_BYTES) // MIB) * MIB


def plan_memory(
    part: Part,
    model: ModelConfig,
    geometry: Geometry,
    plans: Sequence[Plan],
    pools: Mapping[Pool, int],
    memory: int | None,
) -> MemoryPlan:
    """Divide `memory` bytes (default: the part's, less the unplanned share); `pools` are the bytes of the fixed pools.

    The KV pool gets what every request at full context could use, or what is left. Raises BudgetError if that does not
    hold even one request, or if `memory` is more than the part has.
    """
    budget = default_budget(part) if memory is None else memory
    if budget > part.memory:
        raise BudgetError(f"{size(budget)} is more than {part.name} has, {size(part.memory)}", where="--memory")
    held = reserve(plans)
    block = geometry.block_bytes(model)
    left = budget - held - sum(pools.values())
    wanted, least = geometry.max_requests * geometry.table_width, geometry.table_width
    if left < least * block:
        raise _too_small(part, model, geometry, budget, held, pools, least * block)
    return MemoryPlan(
        budget=budget,
        reserve=held,
        kv_blocks=min(wanted, left // block),
        kv_block_bytes=block,
        pools=tuple(PoolRecord(pool=pool, bytes=pools[pool]) for pool in sorted(pools) if pools[pool]),
    )


def full_requests(plan: MemoryPlan, geometry: Geometry) -> int:
    """Requests that can be at full context at the same time."""
    return min(geometry.max_requests, plan.kv_blocks // geometry.table_width)


def size(count: int) -> str:
    """`count` bytes for people: 23.50 GiB, 310.20 MiB, 4.00 KiB."""
    unit, name = next(((unit, name) for unit, name in ((1 << 30, "GiB"), (MIB, "MiB")) if count >= unit), (1 << 10, "KiB"))
    return f"{count / unit:.2f} {name}"


def _too_small(
    part: Part, model: ModelConfig, geometry: Geometry, budget: int, held: int, pools: Mapping[Pool, int], kv: int
) -> BudgetError:
    needed = held + sum(pools.values()) + kv
    parts = [f"{size(held)} reserve (context, images, graphs)"]
    parts += [f"{size(count)} {pool.name.lower()}" for pool, count in pools.items() if count]
    parts += [f"{size(kv)} KV of one request of {geometry.max_context} tokens"]
    slots, flags = "", "--max-context, --buckets, --prefill-buckets or --max-requests"
    if geometry.references:
        slots = f"; references are {slot_arithmetic(model, geometry.key_capacity, geometry.reference_slots)} and a table"
        flags = "--max-context, --buckets, --prefill-buckets, --max-requests, --reference-slots or --key-retention"
    return BudgetError(
        f"{size(budget)} is too small by {size(needed - budget)}: {' + '.join(parts)} = {size(needed)}{slots}",
        where=f"--memory for --gpu {part.name}",
        hint=f"Raise --memory, or lower {flags}.",
    )
