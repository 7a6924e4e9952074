"""How far apart two choices must be before a worker is held to one of them."""

from __future__ import annotations

import msgspec
import pytest

from ouro_build.artifacts.presets import PRESETS
from ouro_build.runtime.selftest import clear_margin

MODEL = PRESETS["ouro-1.4b"].model


@pytest.mark.parametrize(("loops", "layers", "margin"), [(1, 1, 0.2), (4, 2, 0.2), (4, 8, 0.4), (4, 24, 0.693)])
def test_bfloat16_margins_grow_with_the_square_root_of_the_depth(loops: int, layers: int, margin: float) -> None:
    model = msgspec.structs.replace(MODEL, loops=loops, layers=layers, dtype="bfloat16")
    assert clear_margin(model) == pytest.approx(margin, abs=1e-3)


def test_float32_margins_do_not() -> None:
    assert clear_margin(msgspec.structs.replace(MODEL, dtype="float32")) == 0.01
