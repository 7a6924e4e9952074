from typing import Any

import msgspec
import pytest

from ouro_build.artifacts.errors import FitError
from ouro_build.artifacts.fit import Fit, Machine, fit, fit_known_parts
from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.parts import PARTS, find_part
from ouro_build.artifacts.references import slot_arithmetic
from tests.artifact_maker import BLOCK_BYTES, GEOMETRY, GIB, KV_BLOCKS, base_manifest, target, weights_record

WEIGHTS = weights_record()
FIXED = target("h200", WEIGHTS.bytes).memory.total - KV_BLOCKS * BLOCK_BYTES


def manifest(*parts: str) -> Manifest:
    return base_manifest(parts, WEIGHTS)


def machine(part: str, **changes: Any) -> Machine:
    return msgspec.structs.replace(Machine.of_part(find_part(part)), **{"cuda": (13, 0), **changes})


def refusals(found: Fit) -> list[str]:
    return [r.what for t in found.targets for r in t.refusals]


@pytest.mark.parametrize(
    ("built", "found", "fits"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_89", (9, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_90", (9, 1), False),
        ("sm_90", (10, 0), False),
        ("sm_100", (10, 3), False),
        ("sm_120", (12, 0), True),
        ("sm_120", (12, 1), False),
        ("sm_120", (8, 9), False),
    ],
)
def test_capability(built: str, found: tuple[int, int], fits: bool) -> None:
    result = fit(manifest(built), machine("h200", capability=found))
    assert refusals(result) == ([] if fits else ["capability"])
    assert result.accepted == fits
    if not fits:
        with pytest.raises(
            FitError, match=rf"{find_part(built).name}: capability: expected .*, found {found[0]}\.{found[1]} "
        ) as caught:
            _ = result.chosen
        assert caught.value.exit_code == 3
        assert f"--gpu sm_{found[0]}{found[1]}" in caught.value.hint


def test_driver() -> None:
    assert fit(manifest("h200"), machine("h200")).accepted  # ptxas 13.4, driver 13.0: the major counts
    assert refusals(fit(manifest("h200"), machine("h200", cuda=None))) == []
    old = fit(manifest("h200"), msgspec.structs.replace(machine("h200"), cuda=(12, 9)))
    assert refusals(old) == ["cuda"]
    assert "CUDA 13 or newer (images by ptxas 13.4), found CUDA 12.9" in str(old.error())
    assert fit(manifest("sm_80"), msgspec.structs.replace(machine("sm_80"), cuda=(12, 4))).accepted


def test_every_reason_is_named() -> None:
    found = fit(manifest("h200", "rtx-5090"), machine("l4", memory_free=1, cuda=(11, 8)))
    assert refusals(found) == ["capability", "cuda", "memory"] * 2
    text = str(found.error())
    for piece in ("h200: ", "rtx-5090: ", "8.9 (l4)", "CUDA 11.8", "0.00 GiB free of 24.00 GiB", "--memory"):
        assert piece in text


def test_sm_count_is_only_a_note() -> None:
    (found,) = fit(manifest("h200"), machine("h200", sm_count=100)).targets
    assert found.accepted
    assert found.notes == ("sm_count: built for 132 SMs, 100 found: right, perhaps slower",)


@pytest.mark.parametrize(
    ("parts", "name", "base", "chosen"),
    [
        (("h100", "h200"), "NVIDIA H200", "h200", "h200"),
        (("h200", "h100"), "NVIDIA H100 80GB HBM3", "h100", "h100"),
        (("h100", "h100-pcie"), "NVIDIA H100 PCIe", "h100-pcie", "h100-pcie"),
        (("h200", "h100-pcie"), "NVIDIA GH100", "h100-pcie", "h100-pcie"),
        (("a100-80gb", "a40", "l40s"), "NVIDIA GeForce RTX 4090", "rtx-4090", "l40s"),
        (("a100-80gb", "a40", "a10"), "NVIDIA A40", "a40", "a40"),
        (("a40", "a10"), "NVIDIA RTX A5000", "a10", "a10"),
        (("rtx-pro-6000", "rtx-5090"), "NVIDIA GeForce RTX 5090", "rtx-5090", "rtx-5090"),
    ],
)
def test_the_nearest_target_is_chosen(parts: tuple[str, ...], name: str, base: str, chosen: str) -> None:
    assert fit(manifest(*parts), machine(base, name=name)).target == chosen


def test_no_device() -> None:
    found = fit(manifest("h200", "sm_80"), Machine.absent("no driver: libcuda.so.1 not found"))
    assert refusals(found) == ["device", "device"]
    assert found.no_device
    assert "device: expected a GPU of 8.0, found no driver: libcuda.so.1 not found" in str(found.error())


@pytest.mark.parametrize(
    ("memory", "free", "blocks", "fits"),
    [
        (None, 32 * GIB, KV_BLOCKS, True),
        (None, FIXED + 5 * BLOCK_BYTES + 1, 5, True),  # less is free than was planned: a smaller pool
        (None, FIXED + GEOMETRY.table_width * BLOCK_BYTES, GEOMETRY.table_width, True),
        (None, FIXED + GEOMETRY.table_width * BLOCK_BYTES - 1, GEOMETRY.table_width - 1, False),
        (FIXED + 6 * BLOCK_BYTES, 32 * GIB, 6, True),
        (FIXED - 1, 32 * GIB, 0, False),
        (33 * GIB, 32 * GIB, KV_BLOCKS, False),  # more is asked for than is free
        (32 * GIB, 32 * GIB, KV_BLOCKS, True),  # no more than all requests can use
    ],
)
def test_memory(memory: int | None, free: int, blocks: int, fits: bool) -> None:
    found = fit(manifest("rtx-5090"), machine("rtx-5090", memory_free=free), memory).targets[0]
    assert (found.kv_blocks, found.accepted) == (blocks, fits)
    assert [r.what for r in found.refusals] == ([] if fits else ["memory"])
    assert bool(found.notes) == (fits and blocks != KV_BLOCKS)


@pytest.mark.parametrize("memory", [None, FIXED + 6 * BLOCK_BYTES])
def test_an_open_context_is_a_part_of_the_plan_and_not_counted_again(memory: int | None) -> None:
    """A device that holds exactly the plan still holds it when the context, the first part of it, is there."""
    context, planned = GIB // 2, FIXED + 6 * BLOCK_BYTES
    for taken, blocks in ((0, 6), (1, 5)):
        open_ = machine("rtx-5090", memory_free=planned - context - taken, context=context)
        assert open_.available == planned - taken
        found = fit(manifest("rtx-5090"), open_, memory).targets[0]
        if memory is None or not taken:
            assert (found.kv_blocks, found.accepted) == (blocks, True)
        else:
            assert [r.what for r in found.refusals] == ["memory"]
            assert "beside a context of 0.50 GiB" in found.refusals[0].found


def test_more_memory_holds_more_requests() -> None:
    small = msgspec.structs.replace(manifest(), targets=(target("h200", WEIGHTS.bytes, kv_blocks=5),))
    assert fit(small, machine("h200")).chosen.kv_blocks == 5
    assert fit(small, machine("h200"), 32 * GIB).chosen.kv_blocks == GEOMETRY.max_requests * GEOMETRY.table_width


def test_known_parts() -> None:
    found = dict(fit_known_parts(manifest("sm_80", "sm_120")))
    assert list(found) == list(PARTS)
    assert {p.name: f.target for p, f in found.items() if f.accepted} == {
        **{p.name: "a100-80gb" for p in PARTS if p.capability < 90},
        "rtx-5090": "rtx-5090",
        "rtx-pro-6000": "rtx-5090",
    }


def test_reference_slots_are_a_part_of_what_is_needed_with_their_arithmetic() -> None:
    made = manifest("h200")
    sparse = {"sparse_modes": ("dense", "consume"), "key_retention": 0.1, "key_capacity": 7, "reference_slots": 3}
    made = msgspec.structs.replace(made, geometry=msgspec.structs.replace(GEOMETRY, **sparse))
    (refusal,) = fit(made, machine("h200", memory_free=1)).targets[0].refusals
    model = made.model
    assert f"reference slots ({slot_arithmetic(model, 7, 3)}) and one request" in refusal.expected
    assert slot_arithmetic(model, 7, 3) == (
        "3 x (2 layers x 4 heads x (4 x 7 keys + 8 x 16) + 48 of metadata) = 3 x 1,296 = 3,888 bytes"
    )
