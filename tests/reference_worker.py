"""Steps by the reference executor on the host, over the very plans that a build makes: no images, no artifact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from ouro_build.artifacts.manifest import KV_AXES
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.weight_stream import load_packed
from ouro_build.builder.buffers import kv_layout
from ouro_build.builder.oracle import reference_steps
from ouro_build.builder.plan_target import Preparation, prepare
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.engine import Engine
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.step import Steps

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
GOLDEN_CASES = ("mha-fp32", "gqa-fp32", "mha-bf16")


@dataclass(frozen=True)
class ReferenceWorker:
    """A model's steps with `kv_blocks` KV blocks, and their counts."""

    preparation: Preparation
    steps: Steps
    memory: HostMemory
    kv_blocks: int
    coverage: CoverageCounter

    def engine(self, max_requests: int | None = None, depth: int | None = None, *, sparse: bool = False) -> Engine:
        """A scheduler over the steps. One at a time: slots and blocks are handed out from the first again."""
        return Engine(self.steps, self.kv_blocks, max_requests or self.steps.geometry.max_requests, depth, sparse=sparse)


def reference_worker(
    model: str,
    *,
    buckets: tuple[int, ...] = (1, 2, 4, 8),
    prefill_buckets: tuple[int, ...] = (16, 128),
    max_context: int = 256,
    max_requests: int | None = None,
    block_size: int = 16,
    kv_blocks: int | None = None,
    dtype: str | None = "float32",
    kv_axes: tuple[str, ...] = KV_AXES,
    sparse: SparseSpec | None = None,
    retained_mass: bool = False,
) -> ReferenceWorker:
    """Plan `model` as a build does, and lay it out on the host. `kv_axes`: in another order of the KV pool."""
    torch.set_num_threads(1)  # these matrices are small: threads only get in each other's way
    spec = BuildSpec(
        model,
        find_parts(["sm_90"]),
        buckets,
        prefill_buckets,
        max_context=max_context,
        max_requests=max_requests,
        block_size=block_size,
        dtype=dtype,
        sparse=sparse or SparseSpec(),
    )
    preparation = prepare(spec)
    target, geometry, config = preparation.targets[0], preparation.geometry, preparation.source.model
    blocks = kv_blocks or geometry.max_requests * geometry.table_width
    memory = HostMemory({**target.pools, Pool.KV: blocks * geometry.block_bytes(config)})
    for offset, data in load_packed(preparation.source.weights, config):
        memory.write(Pool.WEIGHTS, offset, data)
    # Nothing may be read that was not written.
    for pool in (Pool.KV, Pool.WORKSPACE):
        memory.fill(pool, 0xFF)
    coverage = CoverageCounter()
    kv = kv_layout(config, geometry, kv_axes)
    buffers = tuple(replace(b, shape=kv.shape) if b.pool is Pool.KV else b for b in target.index.buffers)
    plans = (replace(target.index, buffers=buffers), target.columns)
    steps = reference_steps(
        config, geometry, target.part, plans, memory, blocks, coverage, kv_axes, retained_mass=retained_mass
    )
    return ReferenceWorker(preparation, steps, memory, blocks, coverage)
