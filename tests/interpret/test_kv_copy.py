import pytest

from tests.kernel_cases.kv_copy import SHAPES, case, check_far_planes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(dtype: str, shape: tuple[int, int]) -> None:
    case(dtype, "cpu", shape).check()


def test_planes_beyond_31_bits_of_elements() -> None:
    check_far_planes("cpu")
