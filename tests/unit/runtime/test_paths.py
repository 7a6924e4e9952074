"""Which path a worker takes, decided from the manifest and the machine alone."""

from __future__ import annotations

import msgspec
import pytest

from ouro_build.artifacts.errors import FitError
from ouro_build.artifacts.fit import Machine
from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.records import Reason
from ouro_build.runtime import paths
from ouro_build.runtime.paths import Choice, choose_path
from tests.artifact_maker import GEOMETRY, GIB, KV_BLOCKS, base_manifest, weights_record

H200, OTHER, NONE = Machine.of_part(find_part("h200")), Machine.of_part(find_part("a10")), Machine.absent("no CUDA driver")
OLD = msgspec.structs.replace(H200, cuda=(12, 8))


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return base_manifest(("h200",), weights_record())


@pytest.fixture(params=[False, True], ids=["torch for CPU", "torch for CUDA"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(paths, "torch_has_cuda", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize(("wanted", "reason"), [("auto", None), ("graph", None), ("launch", Reason.GRAPHS_DISABLED)])
def test_a_gpu_that_fits_runs_graphs_unless_told_otherwise(manifest: Manifest, wanted: Choice, reason: Reason | None) -> None:
    path = choose_path(manifest, H200, wanted, None)
    assert (path.executor, path.on_device, path.reason) == ("launch" if wanted == "launch" else "graph", True, reason)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [(NONE, Reason.NO_DEVICE), (OTHER, Reason.NO_IMAGE_FOR_ARCH), (OLD, Reason.DRIVER_TOO_OLD)],
)
def test_elsewhere_the_reference_runs_and_says_why(manifest: Manifest, machine: Machine, reason: Reason, cuda: bool) -> None:
    path = choose_path(manifest, machine, "auto", None)
    assert (path.executor, path.reason, path.on_device) == ("reference", reason, cuda and not machine.reason)
    for wanted in ("graph", "launch"):
        with pytest.raises(FitError, match="no target of this artifact fits"):
            choose_path(manifest, machine, wanted, None)


def test_the_reference_may_be_asked_for(manifest: Manifest, cuda: bool) -> None:
    path = choose_path(manifest, H200, "reference", None)
    assert (path.executor, path.reason, path.on_device) == ("reference", Reason.GRAPHS_DISABLED, cuda)
    assert path.kv_blocks == KV_BLOCKS


def test_on_a_device_the_reference_takes_no_more_than_is_free(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "torch_has_cuda", lambda: True)
    plan = manifest.targets[0].memory
    fixed = plan.total - plan.pool_bytes(Pool.KV)
    for blocks in (GEOMETRY.table_width, KV_BLOCKS - 1, KV_BLOCKS, KV_BLOCKS + 1):
        context = 1 << 20
        free = msgspec.structs.replace(OTHER, memory_free=fixed + blocks * plan.kv_block_bytes - context, context=context)
        assert choose_path(manifest, free, "auto", None).kv_blocks == min(blocks, KV_BLOCKS)
    short = msgspec.structs.replace(OTHER, memory_free=fixed + GEOMETRY.table_width * plan.kv_block_bytes - 1)
    with pytest.raises(FitError, match=rf"{short.memory_free + 1} bytes are needed .* {short.memory_free} are free"):
        choose_path(manifest, short, "auto", None)


def test_on_the_host_only_what_was_given_limits_it(manifest: Manifest) -> None:
    assert choose_path(manifest, NONE, "auto", None).kv_blocks == KV_BLOCKS
    assert choose_path(manifest, NONE, "auto", GIB).kv_blocks == KV_BLOCKS
    with pytest.raises(FitError, match="given with --memory"):
        choose_path(manifest, NONE, "auto", 1 << 10)


def test_memory_that_does_not_suffice_is_no_reason_for_another_path(manifest: Manifest) -> None:
    full = msgspec.structs.replace(H200, memory_free=1 << 20)
    with pytest.raises(FitError, match="memory: expected"):
        choose_path(manifest, full, "auto", None)
