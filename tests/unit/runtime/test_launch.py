import msgspec
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.runtime.graph import GraphExecutor
from ouro_build.runtime.launch import LaunchExecutor
from tests.unit.runtime.device_rig import CHAIN, DIAMOND, IMAGES, SPREAD_PARAMETERS, image, opened
from tests.unit.runtime.fake_driver import FakeDriver


@pytest.mark.parametrize("key", [CHAIN, DIAMOND])
def test_launches_are_the_graphs(key: ProgramKey) -> None:
    with opened(FakeDriver()) as rig:
        graphs = GraphExecutor(rig.memory, rig.plans, rig.images.kernels)
        graphs.run(key)
        rig.memory.synchronize()
        expected = list(rig.api.executed)
        graphs.close()
        launches = LaunchExecutor(rig.memory, rig.plans, rig.images.kernels)
        for _ in range(2):
            rig.api.executed.clear()
            launches.run(key)
            rig.memory.synchronize()
            assert rig.api.executed == expected
        launches.close()


def test_keys() -> None:
    with opened(FakeDriver()) as rig:
        launches = LaunchExecutor(rig.memory, rig.plans, rig.images.kernels)
        assert launches.has(CHAIN)
        assert not launches.has(msgspec.structs.replace(CHAIN, mode="consume"))


def test_clusters_are_launched_with_attributes() -> None:
    clustered = (IMAGES[0], image("spread", SPREAD_PARAMETERS, cluster=(2, 1, 1), cooperative=True))
    with opened(FakeDriver(), clustered) as rig:
        LaunchExecutor(rig.memory, rig.plans, rig.images.kernels).run(CHAIN)
        rig.memory.synchronize()
        plain, cluster, _ = rig.api.executed
        assert plain.attributes == {}
        names = {name.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): value for name, value in cluster.attributes.items()}
        assert set(names) == {"CLUSTER_DIMENSION", "COOPERATIVE"}
        assert names["CLUSTER_DIMENSION"].clusterDim.x == 2
        assert (cluster.grid, cluster.block) == ((132, 1, 1), (128, 1, 1))


def test_a_refused_launch_names_the_key() -> None:
    with opened(FakeDriver()) as rig:
        rig.api.fail("cuLaunchKernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 2)
        launches = LaunchExecutor(rig.memory, rig.plans, rig.images.kernels)
        with pytest.raises(DeviceError, match="launching chain/1/dense: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
            launches.run(CHAIN)
