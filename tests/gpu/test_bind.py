from hypothesis import given, settings

from tests.kernel_cases.row_states import LARGE_SCENE, SCENES, Scene, check_bind
from tests.kernel_harness import run_source


@settings(max_examples=50)
@given(SCENES)
def test_does_what_the_model_says(scene: Scene) -> None:
    check_bind(scene, run_source, "cuda")


def test_many_rows() -> None:
    check_bind(LARGE_SCENE, run_source, "cuda")
