"""Flags about sparse decoding: what they come to, and what they cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from ouro_build.artifacts.errors import BudgetError, UsageError
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.references import slot_arithmetic, slot_bytes
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.sparse_spec import SparseSpec, parse_modes
from ouro_build.builder.spec import BuildSpec, find_parts
from tests.unit.builder.plans import MODEL

ALL = ("dense", "capture", "consume", "mixed")
LARGE = PRESETS["ouro-1.4b"].model


def made(context: int = 64, requests: int = 3, **changes: Any) -> dict[str, Any]:
    return dict(SparseSpec(**{"modes": ALL, "key_retention": 0.1, **changes}).geometry(MODEL, context, requests))


def test_a_slot_a_request_with_room_for_what_the_longest_context_retains() -> None:
    assert made() == {"sparse_modes": ALL, "key_retention": 0.1, "key_capacity": 7, "reference_slots": 3}
    assert made(key_bucket=32)["key_capacity"] == 32
    assert made(reference_slots=9)["reference_slots"] == 9


def test_modes_are_listed_in_one_order() -> None:
    assert made(modes=("mixed", "dense"))["sparse_modes"] == ("dense", "mixed")
    assert parse_modes("consume, dense") == ("consume", "dense")


def test_nothing_is_remembered_without_sparse_modes_or_with_all_keys() -> None:
    dense = {"sparse_modes": ("dense",), "key_retention": 1.0, "key_capacity": 0, "reference_slots": 0}
    assert dict(SparseSpec().geometry(MODEL, 64, 3)) == dense
    assert made(key_retention=1.0, reference_slots=4) == {**dense, "sparse_modes": ALL}


def test_memory_decides_the_number_of_slots() -> None:
    one = slot_bytes(MODEL, 7)
    assert made(reference_memory=5 * one + 3)["reference_slots"] == 5
    assert made(reference_memory=5 * one, reference_slots=4)["reference_slots"] == 4
    for slots, memory in ((6, 6 * one - 1), (None, one - 1)):
        with pytest.raises(BudgetError) as caught:
            made(reference_memory=memory, reference_slots=slots)
        assert caught.value.where == "--reference-memory"
        count = slots or 1
        arithmetic = (
            f"{count} x (2 layers x 2 heads x (4 x 7 keys + 8 x 16) + 32 of metadata) = {count} x {one:,} = {count * one:,}"
        )
        assert str(caught.value).startswith(f"{arithmetic} bytes, {memory:,} are given") or arithmetic in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "gib"),
    [(65536, 24.09), (512, 0.28)],
)
def test_bytes_of_256_slots_of_the_large_model(keys: int, gib: float) -> None:
    assert 256 * slot_bytes(LARGE, keys) / 2**30 == pytest.approx(gib, abs=0.01)
    assert f"= {256 * slot_bytes(LARGE, keys):,} bytes" in slot_arithmetic(LARGE, keys, 256)


@pytest.mark.parametrize(
    ("changes", "flag", "text"),
    [
        ({"modes": ("dense", "loose")}, "--sparse-modes", "'loose' is not one of dense,capture,consume,mixed"),
        ({"modes": ("dense", "mixed", "mixed")}, "--sparse-modes", "given twice"),
        ({"modes": ("capture", "consume")}, "--sparse-modes", "dense is missing"),
        ({"modes": ("dense",)}, "--key-retention", "none is to be built"),
        ({"modes": ("dense",), "key_retention": None, "key_bucket": 3}, "--key-bucket", "none is to be built"),
        ({"key_retention": None}, "--key-retention", "sparse modes need it"),
        ({"key_retention": 0.0}, "--key-retention", "outside"),
        ({"key_retention": 1.01}, "--key-retention", "outside"),
        ({"key_retention": float("nan")}, "--key-retention", "outside"),
        ({"key_bucket": 0}, "--key-bucket", "less than 1"),
        ({"key_bucket": 6}, "--key-bucket", "6 keys are too few: 7 of 64 are retained"),
        ({"reference_slots": 0}, "--reference-slots", "less than 1"),
        ({"reference_slots": 2**20 + 1}, "--reference-slots", "more than"),
        ({"reference_memory": 0}, "--reference-memory", "less than 1"),
    ],
)
def test_values_that_a_flag_cannot_have(changes: dict[str, Any], flag: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        made(**changes)
    assert caught.value.where == flag


def test_the_pool_is_in_the_memory_plan_and_in_what_is_said_when_it_does_not_fit() -> None:
    def spec(memory: int | None) -> BuildSpec:
        sparse = SparseSpec(ALL, 0.1, reference_slots=3)
        return BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 2), (16,), max_context=64, memory=memory, sparse=sparse)

    preparation = prepare(spec(None))
    model, geometry = preparation.source.model, preparation.geometry
    held = preparation.targets[0].memory.pool_bytes(Pool.REFERENCES)
    assert 0 <= held - 3 * slot_bytes(model, 7) - 4 * 65 < 6 * 256
    with pytest.raises(BudgetError) as caught:
        prepare(spec(600 << 20))
    assert slot_arithmetic(model, geometry.key_capacity, 3) in str(caught.value)
    assert "--reference-slots" in caught.value.hint
