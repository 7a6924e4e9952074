import pytest

from tests.kernel_cases.linear_silu import SHAPES, case


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bucket", [1, 2, 3, 8, 12, 24])
def test_matches_the_reference(bucket: int, shape: tuple[int, int]) -> None:
    case("float16", bucket=bucket, shape=shape).check()
