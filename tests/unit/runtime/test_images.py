import msgspec
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.errors import ArtifactError, DeviceError
from ouro_build.artifacts.manifest import ImageRecord
from ouro_build.artifacts.plan import Specialization
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.images import Images
from tests.unit.runtime.device_rig import FILES, IMAGES, SCALE, SCALE_PARAMETERS, SPREAD, SPREAD_PARAMETERS, image
from tests.unit.runtime.fake_driver import FakeDriver, cubin

SPECIALIZATIONS = (SCALE, SPREAD)


def load(api: FakeDriver, images: tuple[ImageRecord, ...] = IMAGES, files: dict[str, bytes] = FILES) -> Images:
    return Images(open_driver(0, api), images, SPECIALIZATIONS, files.__getitem__)


def test_kernels_are_loaded_at_once_with_their_shared_memory() -> None:
    api = FakeDriver()
    images = load(api)
    scale, spread = (api.objects[int(k.function)] for k in images.kernels)
    assert (scale.name, scale.loaded, scale.max_shared) == ("scale", True, 100 << 10)
    assert (spread.name, spread.loaded, spread.max_shared) == ("spread", True, 48 << 10)
    assert [(k.threads, k.shared, k.attributes) for k in images.kernels] == [(128, 100 << 10, ()), (128, 0, ())]
    assert images.bytes == sum(map(len, FILES.values()))
    images.close()
    assert api.live() == {"context": 1}


def test_one_file_is_loaded_once() -> None:
    api = FakeDriver()
    same = image("spread", SPREAD_PARAMETERS)
    Images(open_driver(0, api), (same, same), (SPREAD, SPREAD), FILES.__getitem__)
    assert api.calls["cuLibraryLoadData"] == 1


def preferring(carveout: int) -> Specialization:
    return msgspec.structs.replace(SPREAD, options=msgspec.structs.replace(SPREAD.options, carveout=carveout))


def test_specialisations_of_one_file_keep_their_own_carveout() -> None:
    """In any order: the first to be loaded decides nothing for the others."""
    asked, shared = [-1, 100, 50, 50, 0, 100], 100 << 10
    api = FakeDriver()
    records = [image("spread", SPREAD_PARAMETERS, shared=shared)] * len(asked)
    images = Images(open_driver(0, api), records, [preferring(carveout) for carveout in asked], FILES.__getitem__)
    found = [api.objects[int(kernel.function)] for kernel in images.kernels]
    assert [(k.carveout, k.max_shared) for k in found] == [(c, shared) for c in asked]
    assert api.calls["cuLibraryLoadData"] == 4
    assert all(not kernel.attributes for kernel in images.kernels), "a graph's nodes take no more of them"
    images.close()
    assert api.live() == {"context": 1}


def test_blocks_have_the_shared_memory_that_was_asked_for_and_their_own_at_least() -> None:
    """Functions of one file that ask for different amounts are not the same: each must be allowed its own."""
    asked = [0, 60 << 10, 200, 100 << 10, 60 << 10]
    api = FakeDriver()
    options = [msgspec.structs.replace(SPREAD.options, shared=shared) for shared in asked]
    specializations = [msgspec.structs.replace(SPREAD, options=o) for o in options]
    records = [image("spread", SPREAD_PARAMETERS, shared=1024)] * len(asked)
    images = Images(open_driver(0, api), records, specializations, FILES.__getitem__)
    assert [kernel.shared for kernel in images.kernels] == [1024, 60 << 10, 1024, 100 << 10, 60 << 10]
    most = [api.objects[int(kernel.function)].max_shared for kernel in images.kernels]
    assert most == [48 << 10, 60 << 10, 48 << 10, 100 << 10, 60 << 10]
    assert api.calls["cuLibraryLoadData"] == 3
    images.close()


def test_a_carveout_that_the_driver_refuses_is_named() -> None:
    api = FakeDriver()
    api.fail("cuFuncSetAttribute", "CUDA_ERROR_INVALID_VALUE", 2)
    with pytest.raises(DeviceError, match=r"giving spread\.cubin its shared memory: CUDA_ERROR_INVALID_VALUE"):
        Images(open_driver(0, api), IMAGES, (SCALE, preferring(75)), FILES.__getitem__)
    assert api.live() == {"context": 1}


def test_clusters_and_cooperation_are_launch_attributes() -> None:
    api = FakeDriver()
    images = load(api, (IMAGES[0], image("spread", SPREAD_PARAMETERS, cluster=(2, 1, 1), cooperative=True)))
    (_, cluster), (_, cooperative) = images.kernels[1].attributes
    assert (cluster.clusterDim.x, cluster.clusterDim.y, cooperative.cooperative) == (2, 1, 1)


@pytest.mark.parametrize(
    "real",
    [SPREAD_PARAMETERS[:-1], (*SPREAD_PARAMETERS, (40, 8)), ((0, 8), (8, 8), (16, 4), (24, 8), (32, 8))],
    ids=["one fewer", "one more", "another size"],
)
def test_an_image_with_other_parameters_is_refused(real: tuple[tuple[int, int], ...]) -> None:
    api = FakeDriver()
    with pytest.raises(ArtifactError, match=r"spread.cubin \(spread\): parameters .* the manifest says"):
        load(api, files=FILES | {"spread.cubin": cubin("spread", real)})
    assert api.live() == {"context": 1}


def test_a_plan_that_passes_fewer_arguments_is_refused() -> None:
    fewer = SPREAD_PARAMETERS[:-1]
    with pytest.raises(ArtifactError, match="4 parameters, the plans pass 5"):
        load(FakeDriver(), (IMAGES[0], image("spread", fewer)), FILES | {"spread.cubin": cubin("spread", fewer)})


def test_a_parameter_larger_than_a_slot_is_refused() -> None:
    large = ((0, 128), *SCALE_PARAMETERS[1:])
    with pytest.raises(ArtifactError, match="larger than 8 bytes"):
        load(FakeDriver(), (image("scale", large), IMAGES[1]), FILES | {"scale.cubin": cubin("scale", large)})


def test_an_image_that_the_driver_refuses_is_named() -> None:
    api = FakeDriver()
    with pytest.raises(DeviceError, match=r"loading spread.cubin: CUDA_ERROR_INVALID_IMAGE.*\n.*another GPU"):
        load(api, files=FILES | {"spread.cubin": b"no cubin"})
    assert api.live() == {"context": 1}


def test_a_kernel_that_is_not_in_its_image_is_named() -> None:
    with pytest.raises(DeviceError, match=r"loading spread\.cubin: CUDA_ERROR_NOT_FOUND"):
        load(FakeDriver(), (IMAGES[0], msgspec.structs.replace(IMAGES[1], function="other")))


def test_an_unexpected_status_of_the_parameter_query_is_an_error() -> None:
    api = FakeDriver()
    api.fail("cuFuncGetParamInfo", "CUDA_ERROR_UNKNOWN", 3)
    with pytest.raises(DeviceError, match=r"asking for the parameters of scale\.cubin: CUDA_ERROR_UNKNOWN"):
        load(api)


def test_images_are_not_loaded_once_ready() -> None:
    driver = open_driver(0, FakeDriver())
    driver.seal()
    with pytest.raises(DeviceError, match="loading images after"):
        Images(driver, IMAGES, SPECIALIZATIONS, FILES.__getitem__)
