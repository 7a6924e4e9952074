"""The references of what keeps the row state, against their meaning in plain Python."""

from hypothesis import given

from tests.kernel_cases.row_states import (
    LARGE_SCENE,
    LIMITS,
    LOOPS,
    POSITIONS,
    SCENES,
    Scene,
    check_advance,
    check_bind,
    check_resolve,
)
from tests.kernel_harness import run_reference


@given(SCENES)
def test_bind(scene: Scene) -> None:
    check_bind(scene, run_reference)


@given(SCENES, LIMITS)
def test_resolve(scene: Scene, limits: tuple[int, int]) -> None:
    check_resolve(scene, limits, run_reference)


@given(SCENES)
def test_advance(scene: Scene) -> None:
    check_advance(scene, run_reference)


def test_many_rows() -> None:
    check_bind(LARGE_SCENE, run_reference)
    check_resolve(LARGE_SCENE, (LOOPS, POSITIONS), run_reference)
    check_advance(LARGE_SCENE, run_reference)
