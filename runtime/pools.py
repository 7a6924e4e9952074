"""A worker's pools with the executors over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ouro_build.artifacts.columns import PlanIndex
from ouro_build.artifacts.errors import RestoreError
from ouro_build.artifacts.manifest import MemoryPlan
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.memory import Memory


@dataclass(frozen=True)
class Pools:
    """`executors` in the order of preference; `failures` says why a graph could not be restored, `notes` what differs
    otherwise from what was planned. `settle` begins to give back what only loading needed, and returns at once. `unbuilt` runs
    modes that have no plan, where torch is here.
    """

    index: PlanIndex
    memory: Memory
    kv_blocks: int
    executors: Sequence[Executor]
    failures: Mapping[ProgramKey, RestoreError]
    close: Callable[[], None]
    notes: tuple[str, ...] = ()
    settle: Callable[[], None] = lambda: None
    unbuilt: Executor | None = None

    @property
    def every_note(self) -> tuple[str, ...]:
        """`notes`, then a line for each of `failures`."""
        return (*self.notes, *(f"{error.where}: {error.what}" for error in self.failures.values()))


def pool_sizes(plan: MemoryPlan, kv_blocks: int) -> dict[Pool, int]:
    """Bytes of every pool with `kv_blocks` KV blocks."""
    return {pool: plan.pool_bytes(pool, kv_blocks) for pool in Pool}
