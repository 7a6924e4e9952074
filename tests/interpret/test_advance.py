from hypothesis import given, settings

from tests.kernel_cases.row_states import LARGE_SCENE, SCENES, Scene, check_advance
from tests.kernel_harness import run_source


@settings(max_examples=25)
@given(SCENES)
def test_does_what_the_model_says(scene: Scene) -> None:
    check_advance(scene, run_source, "cpu")


def test_many_rows() -> None:
    check_advance(LARGE_SCENE, run_source, "cpu")
