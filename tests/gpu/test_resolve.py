from hypothesis import given, settings

from tests.kernel_cases.row_states import LARGE_SCENE, LIMITS, LOOPS, POSITIONS, SCENES, Scene, check_resolve
from tests.kernel_harness import run_source


@settings(max_examples=50)
@given(SCENES, LIMITS)
def test_does_what_the_model_says(scene: Scene, limits: tuple[int, int]) -> None:
    check_resolve(scene, limits, run_source, "cuda")


def test_many_rows() -> None:
    check_resolve(LARGE_SCENE, (LOOPS, POSITIONS), run_source, "cuda")
