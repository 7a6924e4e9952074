from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_cases.row_states import LARGE_SCENE, LOOPS, SCENES, Scene, check_resolve
from tests.kernel_harness import run_source


@settings(max_examples=50)
@given(SCENES, st.integers(1, LOOPS + 1))
def test_does_what_the_model_says(scene: Scene, loop_limit: int) -> None:
    check_resolve(scene, loop_limit, run_source, "cuda")


def test_many_rows() -> None:
    check_resolve(LARGE_SCENE, LOOPS, run_source, "cuda")
