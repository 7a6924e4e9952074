import pytest

from tests.kernel_cases.exit_gate import SIZES, case


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_reference(dtype: str, size: int) -> None:
    case(dtype, "cuda", size).check()
