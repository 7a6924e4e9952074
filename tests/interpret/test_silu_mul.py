import pytest

from tests.kernel_cases.silu_mul import SIZES, case


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # meant: the activation is then zero
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_reference(dtype: str, size: int) -> None:
    case(dtype, "cpu", size).check()
