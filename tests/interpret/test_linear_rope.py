import pytest

from tests.kernel_cases.linear_rope import SHAPES, case


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bucket", [1, 2, 3, 7, 12])
def test_matches_the_reference(bucket: int, shape: tuple[int, int, int, int]) -> None:
    case("float16", shape=shape, bucket=bucket).check()
