"""Everything that a worker holds on a device: taken in order, given back whatever fails, and not before it has run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import ArtifactError, DeviceError
from ouro_build.artifacts.fit import CONTEXT_BYTES
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.reader import Artifact, open_artifact
from ouro_build.runtime.device_pools import open_device_pools
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.paths import WorkerPath
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.worker import Worker
from tests.artifact_maker import KV_BLOCKS, make_artifact
from tests.unit.runtime.fake_driver import FakeDriver, cubin

KEYS = (ProgramKey("prelude", 1), ProgramKey("recurrent", 2))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("pools") / "a.ouro"
    make_artifact(path, ("h200",), embedded=True, cubin=lambda image: cubin(image.function, image.parameters))
    return open_artifact(path)


def opened(
    artifact: Artifact,
    api: FakeDriver,
    executor: ExecutorName = "graph",
    loading: Loading = Loading(),  # noqa: B008 - it is frozen
    clock: StartupClock | None = None,
) -> Pools:
    path = WorkerPath(artifact.manifest.targets[0], True, executor, None, KV_BLOCKS, ())
    return open_device_pools(artifact, path, loading, clock or StartupClock(0.0), open_driver(0, api))


def test_graphs_and_launches_over_the_artifacts_weights(artifact: Artifact) -> None:
    api = FakeDriver()
    pools = opened(artifact, api)
    assert [e.name for e in pools.executors] == ["graph", "launch"]
    assert all(e.has(key) for e in pools.executors for key in KEYS)
    assert pools.failures == {}
    weights = artifact.manifest.weights
    stored = (artifact.path / "weights.safetensors").read_bytes()[-weights.bytes :]
    assert pools.memory.read(Pool.WEIGHTS, 0, weights.bytes).tobytes() == stored
    pools.close()
    assert api.live() == {}


def test_launches_alone(artifact: Artifact) -> None:
    api = FakeDriver()
    pools = opened(artifact, api, "launch")
    assert [e.name for e in pools.executors] == ["launch"]
    assert api.calls["cuGraphCreate"] == 0
    pools.close()
    assert api.live() == {}


def test_what_still_runs_is_waited_for_before_anything_is_given_back(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeDriver()
    pools = opened(artifact, api)
    pools.executors[0].run(KEYS[1])
    assert api.executed == []
    at_release: list[int] = []

    def watched(name: str) -> None:
        release = getattr(api, name)

        def call(handle: Any) -> Any:
            at_release.append(len(api.executed))
            return release(handle)

        monkeypatch.setattr(api, name, call)

    for name in ("cuGraphExecDestroy", "cuLibraryUnload", "cuMemFree"):
        watched(name)
    pools.close()
    assert at_release
    assert set(at_release) == {2}


def test_a_graph_that_cannot_be_restored_says_why(artifact: Artifact) -> None:
    api = FakeDriver()
    api.fail("cuGraphInstantiate", "CUDA_ERROR_OUT_OF_MEMORY", 2)
    pools = opened(artifact, api)
    assert list(pools.failures) == [KEYS[1]]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in pools.failures[KEYS[1]].what
    pools.close()
    assert api.live() == {}


@pytest.mark.parametrize("over", [0, 1 << 20])
@pytest.mark.parametrize("before", [0, 300 << 20, 3 << 30])
def test_memory_beyond_the_plan_is_noted(artifact: Artifact, monkeypatch: pytest.MonkeyPatch, before: int, over: int) -> None:
    """The plan's reserve covers the context, open before, and what images and graphs take; what others hold is not counted."""
    api = FakeDriver(memory=8 << 30)
    api.taken = before
    reserve = artifact.manifest.targets[0].memory.reserve
    upload = api.cuGraphUpload

    def taking(instance: Any, stream: Any) -> Any:
        api.taken = before + reserve - min(before, CONTEXT_BYTES) + over
        return upload(instance, stream)

    monkeypatch.setattr(api, "cuGraphUpload", taking)
    pools = opened(artifact, api)
    planned = reserve + sum(pools.memory.size(pool) for pool in Pool)
    said = f"memory: {(planned + over) / 2**20:.1f} MiB are in use, {planned / 2**20:.1f} were planned"
    assert [note.split(", unless")[0] for note in pools.notes] == ([said] if over else [])
    worker = object.__new__(Worker)
    worker.path, worker._pools = WorkerPath(artifact.manifest.targets[0], True, "graph", None, KV_BLOCKS, ("first",)), pools
    assert worker.notes == ("first", *pools.notes)
    pools.close()


CALLS = ("cuMemAlloc", "cuMemHostAlloc", "cuEventCreate", "cuLibraryLoadData", "cuFuncLoad")


@pytest.mark.parametrize(
    ("name", "at"), [("cuStreamCreate", 1), ("cuMemcpyHtoDAsync", 1), *((name, at) for name in CALLS for at in (1, 2))]
)
def test_whatever_fails_nothing_is_kept(artifact: Artifact, name: str, at: int) -> None:
    api = FakeDriver()
    api.fail(name, "CUDA_ERROR_OUT_OF_MEMORY", at)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        opened(artifact, api)
    assert api.live() == {}


def test_damage_that_shows_only_now_leaves_nothing_either(artifact: Artifact) -> None:
    target = artifact.manifest.targets[0]
    record = artifact.manifest.weights.file
    lost = msgspec.structs.replace(artifact.manifest.weights, file=msgspec.structs.replace(record, sha256="0" * 64))
    damaged = Artifact(artifact.path, msgspec.structs.replace(artifact.manifest, weights=lost), artifact.identity)
    api = FakeDriver()
    with pytest.raises(ArtifactError, match="damaged"):
        opened(damaged, api)
    assert api.live() == {}
    moved = msgspec.structs.replace(target, plan_index="nowhere.json")
    damaged = Artifact(artifact.path, msgspec.structs.replace(artifact.manifest, targets=(moved,)), artifact.identity)
    with pytest.raises(ArtifactError, match="no such file"):
        opened(damaged, api)
    assert api.live() == {}


def test_a_damaged_chunk_is_refused_though_all_else_is_ready(artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "a.ouro"
    shutil.copytree(artifact.path, copy)
    weights = copy / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    api = FakeDriver()
    damaged = Artifact(copy, artifact.manifest, artifact.identity)
    with pytest.raises(ArtifactError, match=rf"{weights}: chunk 0 \(bytes 0 … {len(content)}\) is damaged") as raised:
        opened(damaged, api)
    assert raised.value.exit_code == 4
    assert api.calls["cuGraphInstantiate"] == 2, "graphs are restored meanwhile"
    assert api.live() == {}
    pools = opened(damaged, api, loading=Loading(verify="fast"))
    pools.close()
    assert api.live() == {}


def test_the_record_counts_graphs_and_their_nodes(artifact: Artifact) -> None:
    clock = StartupClock(0.0)
    opened(artifact, FakeDriver(), clock=clock).close()
    record = clock.record()
    assert (record.graphs, record.nodes) == (2, 3)
    assert record.node_us is not None
    moved = {p.name: p.bytes for p in record.phases if p.bytes}
    total = artifact.manifest.weights.bytes
    assert moved["weights"] == moved["copy weights"] == moved["lock pages"] == total
    assert moved["check weights"] == artifact.manifest.weights.file.bytes


def test_nothing_is_allocated_after_the_worker_is_ready(artifact: Artifact) -> None:
    api = FakeDriver()
    pools = opened(artifact, api)
    before = {name: api.calls[name] for name in ("cuMemAlloc", "cuMemHostAlloc", "cuLibraryLoadData", "cuGraphInstantiate")}
    for executor in pools.executors:
        for key in KEYS:
            executor.run(key)
    pools.memory.write(Pool.IO, 0, np.zeros(64, np.int32))
    pools.memory.read(Pool.WORKSPACE, 0, 256)
    assert {name: api.calls[name] for name in before} == before
    pools.close()
