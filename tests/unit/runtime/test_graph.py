from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.columns import GraphEntry, GraphStep
from ouro_build.artifacts.errors import DeviceError, RestoreError
from ouro_build.artifacts.plan import Edge, Plan, Pool, ProgramKey
from ouro_build.artifacts.records import CoverageRecord, KeyCount
from ouro_build.runtime.graph import GraphExecutor, restore_order
from ouro_build.runtime.launch import LaunchExecutor
from tests.unit.runtime.device_rig import (
    CHAIN,
    DIAMOND,
    IMAGES,
    PLANS,
    SPREAD_PARAMETERS,
    A,
    B,
    Rig,
    image,
    opened,
    scale,
    spread,
)
from tests.unit.runtime.fake_driver import FakeDriver, Node

FULL, PROGRAMMATIC = 0, 1


def executor(rig: Rig, *keys: object) -> GraphExecutor:
    return GraphExecutor(rig.memory, rig.plans, rig.images.kernels, keys or None)  # type: ignore[arg-type]


@pytest.mark.parametrize("bindings", [12, 13])
def test_graphs_have_the_plans_edges(bindings: int) -> None:
    with opened(FakeDriver(bindings=bindings)) as rig:
        graphs = executor(rig)
        chain, diamond = rig.api.graphs()
        assert chain.edges == [(0, 1, FULL), (1, 2, FULL)]
        assert sorted(diamond.edges) == [(0, 1, PROGRAMMATIC), (0, 2, FULL), (1, 3, PROGRAMMATIC), (2, 3, FULL)]
        assert {kind: port for (_, _, kind), port in zip(diamond.edges, diamond.ports, strict=True)} == {0: 0, 1: 1}
        assert chain.uploaded
        assert diamond.uploaded
        graphs.close()


def test_what_was_restored_is_counted_and_nothing_else_is_kept() -> None:
    with opened(FakeDriver()) as rig:
        graphs = executor(rig)
        restored = graphs.restored
        assert (restored.graphs, restored.nodes) == (2, 7)
        assert restored.seconds > 0
        assert "Graph" not in rig.api.live()
        assert rig.api.live()["Instance"] == 2
        graphs.close()
        assert "Instance" not in rig.api.live()
        assert not graphs.has(CHAIN)


def test_a_replay_runs_every_launch_of_the_plan() -> None:
    with opened(FakeDriver()) as rig:
        graphs = executor(rig)
        graphs.run(CHAIN)
        assert rig.api.executed == []  # submitted, not waited for
        rig.memory.synchronize()
        first, second, third = rig.api.executed
        work, weights = rig.memory.base(Pool.WORKSPACE), rig.memory.base(Pool.WEIGHTS)
        assert (first.kernel.name, first.grid, first.block, first.shared) == ("scale", (3, 2, 1), (128, 1, 1), 100 << 10)
        assert first.arguments[:4] == (work, weights + 256, work + 256, 2**32 - 5)
        assert (second.kernel.name, second.grid, second.shared) == ("spread", (132, 1, 1), 0)
        assert second.arguments == (work + 256, rig.memory.base(Pool.KV), 4096, 0, 0)
        assert third.arguments[0] == work + 256
        graphs.close()


def test_replays_are_in_order_with_writes_and_reads() -> None:
    api = FakeDriver()

    def double(fake: FakeDriver, node: Node) -> None:
        fake.view(node.arguments[2], 64)[:] = fake.view(node.arguments[0], 64) * 2

    api.behaviours["scale"] = double
    with opened(api) as rig:
        graphs = executor(rig)
        for value in (3, 5):
            rig.memory.write(Pool.WORKSPACE, 0, np.full(64, value, np.uint8))
            graphs.run(CHAIN)
            assert (rig.memory.read(Pool.WORKSPACE, 0, 64) == 4 * value).all()
        graphs.close()


def test_only_the_keys_asked_for_are_restored() -> None:
    with opened(FakeDriver()) as rig:
        graphs = executor(rig, DIAMOND)
        assert graphs.has(DIAMOND)
        assert not graphs.has(CHAIN)
        assert graphs.restored.graphs == 1
        graphs.close()


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("cuGraphCreate", 1),
        ("cuGraphAddKernelNode", 2),
        ("cuGraphInstantiate", 1),
        ("cuGraphUpload", 1),
    ],
)
def test_a_graph_that_the_driver_refuses_is_left_out_with_its_reason(name: str, at: int) -> None:
    with opened(FakeDriver()) as rig:
        rig.api.fail(name, "CUDA_ERROR_OUT_OF_MEMORY", at)
        graphs = executor(rig)
        assert not graphs.has(CHAIN)
        assert graphs.has(DIAMOND)
        assert list(graphs.failures) == [CHAIN]
        assert isinstance(graphs.failures[CHAIN], RestoreError)
        assert "chain/1/dense: its graph cannot be restored" in str(graphs.failures[CHAIN])
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(graphs.failures[CHAIN])
        assert graphs.restored.graphs == 1
        assert rig.api.live()["Instance"] == 1
        assert "Graph" not in rig.api.live()
        graphs.close()


def test_programmatic_edges_that_are_refused_leave_the_graph_out() -> None:
    with opened(FakeDriver()) as rig:
        rig.api.fail("cuGraphAddDependencies", "CUDA_ERROR_NOT_SUPPORTED")
        graphs = executor(rig)
        assert list(graphs.failures) == [DIAMOND]
        assert "adding 2 programmatic edges" in graphs.failures[DIAMOND].what
        graphs.close()


TOKEN = ProgramKey("token", 1)
FORK = ProgramKey("fork", 1)


@pytest.mark.parametrize("bindings", [12, 13])
def test_a_sequence_is_one_graph_of_joined_runs(bindings: int) -> None:
    token = GraphEntry(TOKEN, (GraphStep(0), GraphStep(1, 3, Edge.PROGRAMMATIC)))
    with opened(FakeDriver(bindings=bindings), graphs=(token,)) as rig:
        graphs = executor(rig)
        assert (graphs.restored.graphs, graphs.restored.nodes) == (1, 3 + 3 * 4)
        (graph,) = rig.api.graphs()
        chain = [(0, 1, FULL), (1, 2, FULL)]
        diamonds = [
            edge
            for at in (3, 7, 11)
            for edge in (
                (at - 1, at, PROGRAMMATIC),  # from the end of the run before it
                (at, at + 1, PROGRAMMATIC),
                (at, at + 2, FULL),
                (at + 1, at + 3, PROGRAMMATIC),
                (at + 2, at + 3, FULL),
            )
        ]
        assert sorted(graph.edges) == sorted(chain + diamonds)
        assert {port for (_, _, kind), port in zip(graph.edges, graph.ports, strict=True) if kind} == {1}
        graphs.run(TOKEN)
        rig.memory.synchronize()
        scales, once = ["scale", "spread", "scale"], ["scale", "spread", "spread", "scale"]
        assert [node.kernel.name for node in rig.api.executed] == scales + 3 * once
        graphs.close()


@pytest.mark.parametrize("join", Edge)
def test_every_first_launch_follows_every_last_one(join: Edge) -> None:
    """Also past a plan without launches."""
    plans = (Plan(FORK, (scale(A, B), spread(A))), Plan(ProgramKey("empty", 1), ()))
    token = GraphEntry(TOKEN, (GraphStep(0), GraphStep(1, 2), GraphStep(0, 2, join)))
    with opened(FakeDriver(), plans=plans, graphs=(token,)) as rig:
        graphs = executor(rig)
        (graph,) = rig.api.graphs()
        pairs = [(a, b) for start in (0, 2) for a in (start, start + 1) for b in (start + 2, start + 3)]
        assert sorted(graph.edges) == sorted((a, b, int(join)) for a, b in pairs)
        assert graphs.restored.nodes == 6
        graphs.close()


def test_graphs_go_by_their_own_keys_and_launches_by_those_of_plans() -> None:
    """A sequence is none of the plans, and a plan need not have a graph."""
    token = GraphEntry(TOKEN, (GraphStep(0, 3),))
    with opened(FakeDriver(), graphs=(GraphEntry(DIAMOND, (GraphStep(1),)), token)) as rig:
        graphs, launches = executor(rig), LaunchExecutor(rig.memory, rig.plans, rig.images.kernels)
        assert [key for key in (CHAIN, DIAMOND, TOKEN) if graphs.has(key)] == [DIAMOND, TOKEN]
        assert [key for key in (CHAIN, DIAMOND, TOKEN) if launches.has(key)] == [CHAIN, DIAMOND]
        assert graphs.restored.nodes == 4 + 9
        graphs.close()


def test_an_edge_between_runs_that_is_refused_leaves_the_graph_out() -> None:
    token = GraphEntry(TOKEN, (GraphStep(0, 3, Edge.PROGRAMMATIC),))
    with opened(FakeDriver(), plans=PLANS[:1], graphs=(token,)) as rig:
        rig.api.fail("cuGraphAddDependencies", "CUDA_ERROR_NOT_SUPPORTED")
        graphs = executor(rig)
        assert "adding 2 programmatic edges to the graph of token/1/dense" in graphs.failures[TOKEN].what
        assert graphs.restored.nodes == 0
        graphs.close()


def test_a_key_without_a_graph_is_a_failure() -> None:
    missing = msgspec.structs.replace(CHAIN, bucket=64)
    with opened(FakeDriver()) as rig:
        graphs = executor(rig, missing)
        assert "no such graph" in graphs.failures[missing].what
        assert graphs.restored.graphs == 0


def test_an_error_at_replay_names_the_key() -> None:
    with opened(FakeDriver()) as rig:
        graphs = executor(rig)
        rig.api.fail("cuGraphLaunch", "CUDA_ERROR_ILLEGAL_ADDRESS")
        with pytest.raises(DeviceError, match="replaying the graph of chain/1/dense: CUDA_ERROR_ILLEGAL_ADDRESS"):
            graphs.run(CHAIN)
        graphs.close()


def test_cluster_attributes_reach_the_nodes() -> None:
    clustered = (IMAGES[0], image("spread", SPREAD_PARAMETERS, cluster=(4, 1, 1)))
    with opened(FakeDriver(), clustered) as rig:
        graphs = executor(rig, CHAIN)
        graphs.run(CHAIN)
        rig.memory.synchronize()
        counts = [[v.clusterDim.x for v in node.attributes.values()] for node in rig.api.executed]
        assert counts == [[], [4], []]
        graphs.close()


def test_graphs_are_not_restored_once_ready() -> None:
    with opened(FakeDriver()) as rig:
        rig.memory.seal()
        with pytest.raises(DeviceError, match="restoring graphs after the worker was ready"):
            executor(rig)


def test_graphs_that_were_replayed_most_come_first_then_small_buckets() -> None:
    keys = [ProgramKey("a", 8), ProgramKey("b", 1), ProgramKey("a", 2), ProgramKey("b", 8)]
    assert restore_order(keys) == [keys[1], keys[2], keys[0], keys[3]]
    seen: dict[str, Any] = {"mode": "dense", "variant": "", "live_rows": 0, "padded_rows": 0}
    counts = (KeyCount(program="b", bucket=8, replays=5, **seen), KeyCount(program="a", bucket=4, replays=9, **seen))
    assert restore_order(keys, CoverageRecord(keys=counts, fallbacks=(), steps=(), graphs=())) == [
        keys[3],
        keys[1],
        keys[2],
        keys[0],
    ]
