import pytest

from tests.kernel_cases.linear_rope import SHAPES, case


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 16, 128, 2048)])
@pytest.mark.parametrize("bucket", [1, 2, 3, 8, 32])
def test_matches_the_reference(bucket: int, shape: tuple[int, int, int, int], dtype: str) -> None:
    case(dtype, "cuda", shape=shape, bucket=bucket).check()
