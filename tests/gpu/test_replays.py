"""Graphs replayed thousands of times over random states must leave, every time, the very bits that their launches leave.

A race between kernels joined by programmatic edges, or beside each other, shows here or nowhere: what a kernel may read too
early is the workspace as an earlier replay left it. So states follow one another in random order, with nothing waited for, and
other work comes and goes on the GPU meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.reader import open_artifact
from ouro_build.builder.sparse import NO_CAPTURE
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.runtime.device_memory import DeviceMemory
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.machine import probe
from ouro_build.runtime.paths import choose_path
from ouro_build.runtime.placing import open_pools
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.reference import pool_tensors
from ouro_build.runtime.scenes import Scene, blocks_needed
from ouro_build.runtime.startup import StartupClock
from tests.gpu.test_golden import make
from tests.reference_worker import GOLDEN

CUDA: Any = torch.cuda
REPLAYS = 10_000
STATES = 64
SPAN = 200
"""Tokens of context that a row may have: enough for several splits of attention."""
BUCKETS = (1, 8)
FORMS = (("dense", ""), ("capture", ""), ("consume", ""), ("mixed", ""), ("mixed", NO_CAPTURE))
MAX_REQUESTS = 3
"""So few that rows of one request meet in a loop: then one reads keys that another writes in the same program."""
LEFT = (Pool.KV, Pool.STATE, Pool.IO, Pool.REFERENCES)
"""Pools through which a program leaves anything behind, and that hold all that it starts from."""


@pytest.fixture(scope="module", params=[("mha-bf16", "bfloat16"), ("gqa-fp32", "float32")], ids=lambda p: p[1])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    name, dtype = request.param
    sparse = SparseSpec(tuple(dict.fromkeys(mode for mode, _ in FORMS)), 0.1, reference_slots=BUCKETS[-1])
    folder = tmp_path_factory.mktemp(dtype)
    shapes = {"buckets": BUCKETS, "prefill_buckets": (16,), "max_requests": MAX_REQUESTS}
    made = Rig(make(folder, str(GOLDEN / name), dtype=dtype, sparse=sparse, **shapes))
    yield made
    made.pools.close()


class Rig:
    """An artifact's pools, as tensors too, and a torch stream that is the pools' own: torch's work and replays are in order."""

    def __init__(self, path: Path) -> None:
        artifact = open_artifact(path)
        self.manifest = artifact.manifest
        chosen = choose_path(artifact.manifest, probe(), "graph", None)
        wanted = blocks_needed(artifact.manifest.geometry, BUCKETS[-1], SPAN)
        self.pools: Pools = open_pools(artifact, replace(chosen, kv_blocks=wanted), Loading(), StartupClock(), open_driver())
        assert not self.pools.failures
        self.graph, self.launch = self.pools.executors
        assert (self.graph.name, self.launch.name) == ("graph", "launch")
        assert isinstance(self.pools.memory, DeviceMemory)
        self.memory = self.pools.memory
        self.now = {pool: tensor for pool, tensor in pool_tensors(self.memory).items() if pool in LEFT}
        self.stream = CUDA.ExternalStream(int(self.memory.stream))

    def state(self, key: ProgramKey, seed: int) -> dict[Pool, torch.Tensor]:
        """A random state for `key`: live rows anywhere in the bucket, tokens, positions, loops, block tables, all keys."""
        live = np.random.default_rng([seed, key.bucket]).random(key.bucket) < 0.7
        live[seed % key.bucket] = True
        model, geometry = self.manifest.model, self.manifest.geometry
        scene = Scene(model, geometry, key, live.tolist(), self.pools.kv_blocks, seed, SPAN)
        scene.write(self.memory, {buffer.name: buffer for buffer in self.pools.index.buffers})
        return self.held()

    def held(self) -> dict[Pool, torch.Tensor]:
        return {pool: tensor.clone() for pool, tensor in self.now.items()}

    def run(self, executor: Executor, key: ProgramKey, state: dict[Pool, torch.Tensor]) -> None:
        """As many loops as there are, one right after another, from `state`: rows leave the batch as they finish theirs."""
        for pool, tensor in self.now.items():
            tensor.copy_(state[pool])
        for _ in range(self.manifest.model.loops):
            executor.run(key)

    def differences(self, wanted: dict[Pool, torch.Tensor]) -> torch.Tensor:
        """Bytes of the pools that are not as `wanted`, int64, not waited for."""
        return torch.stack([(tensor != wanted[pool]).sum() for pool, tensor in self.now.items()]).sum()


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(filter(None, form)))
def test_ten_thousand_replays_leave_the_bits_of_launches(rig: Rig, bucket: int, form: tuple[str, str]) -> None:
    key = ProgramKey("recurrent", bucket, *form)
    bursts = -(-REPLAYS // rig.manifest.model.loops)
    with torch.cuda.stream(rig.stream):
        states = [rig.state(key, seed) for seed in range(STATES)]
        wanted = []
        for state in states:
            rig.run(rig.launch, key, state)
            wanted.append(rig.held())
        assert not any(torch.equal(wanted[0][Pool.STATE], other[Pool.STATE]) for other in wanted[1:])
        order = np.random.default_rng(bucket).integers(STATES, size=bursts).tolist()
        seen = torch.empty(bursts, dtype=torch.int64, device=rig.now[Pool.KV].device)
        disturbance = Disturbance()
        for burst, at in enumerate(order):
            disturbance.submit(burst)
            rig.run(rig.graph, key, states[at])
            seen[burst] = rig.differences(wanted[at])
        rig.memory.synchronize()
    wrong = seen.nonzero().squeeze(1).tolist()
    assert not wrong, f"{len(wrong)} of {bursts} bursts of replays differ, the first is {wrong[0]}: {int(seen[wrong[0]])} bytes"


class Disturbance:
    """Work of varying size on another stream, so that programs find now many multiprocessors free, now few."""

    def __init__(self) -> None:
        self._stream = CUDA.Stream()
        self._values = torch.ones(1 << 22, device="cuda")
        torch.cuda.synchronize()

    def submit(self, number: int) -> None:
        with torch.cuda.stream(self._stream):
            if number % 3:
                self._values[: 1 << (10 + number % 13)].mul_(-1)
