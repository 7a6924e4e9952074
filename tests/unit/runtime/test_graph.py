import msgspec
import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import DeviceError, RestoreError
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime.graph import GraphExecutor
from tests.unit.runtime.device_rig import CHAIN, DIAMOND, IMAGES, SPREAD_PARAMETERS, Rig, image, opened
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


def test_a_key_without_a_plan_is_a_failure() -> None:
    missing = msgspec.structs.replace(CHAIN, bucket=64)
    with opened(FakeDriver()) as rig:
        graphs = executor(rig, missing)
        assert "no plan" in graphs.failures[missing].what
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
