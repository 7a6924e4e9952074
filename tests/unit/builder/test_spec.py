"""Every value that a flag cannot have is refused with the flag's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.parts import find_part
from ouro_build.builder.spec import BuildSpec, find_parts, parse_buckets
from tests.unit.builder.plans import MODEL

GOOD = BuildSpec(model="preset:tiny", parts=(find_part("sm_90"),), buckets=(1, 2, 4))


def test_a_good_spec() -> None:
    geometry = GOOD.geometry(MODEL)
    assert geometry.max_context == MODEL.max_position
    assert geometry.max_requests == 4


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"parts": ()}, "--gpu"),
        ({"parts": find_parts(["h200", "sm_90"])}, "--gpu"),
        ({"buckets": ()}, "--buckets"),
        ({"buckets": (0, 1)}, "--buckets"),
        ({"buckets": (-1,)}, "--buckets"),
        ({"buckets": (2, 1)}, "--buckets"),
        ({"buckets": (1, 1)}, "--buckets"),
        ({"buckets": (1, 1025)}, "--buckets"),
        ({"prefill_buckets": ()}, "--prefill-buckets"),
        ({"prefill_buckets": (128, 16)}, "--prefill-buckets"),
        ({"prefill_buckets": (8193,)}, "--prefill-buckets"),
        ({"block_size": 24}, "--block-size"),
        ({"block_size": 4}, "--block-size"),
        ({"dtype": "float16"}, "--dtype"),
        ({"max_context": 1}, "--max-context"),
        ({"max_requests": 0}, "--max-requests"),
        ({"memory": 0}, "--memory"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**64}, "--seed"),
    ],
)
def test_values_that_a_flag_cannot_have(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(GOOD, **change)
    assert caught.value.where == flag
    assert caught.value.exit_code == 2


def test_a_context_longer_than_the_models() -> None:
    with pytest.raises(UsageError, match="more than the model's 64") as caught:
        replace(GOOD, max_context=65).geometry(MODEL)
    assert caught.value.where == "--max-context"


def test_an_unknown_gpu_is_told_the_known_ones() -> None:
    with pytest.raises(UsageError, match="h200"):
        find_parts(["h200", "gtx-970"])


@pytest.mark.parametrize("text", ["", "1,", "a", "1;2", "1.5"])
def test_what_is_no_list_of_buckets(text: str) -> None:
    with pytest.raises(UsageError, match="--buckets"):
        parse_buckets(text, "--buckets")
