import pytest

from tests.kernel_cases.linear_silu import SHAPES, case


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, (5632, 2048)])
@pytest.mark.parametrize("bucket", [1, 2, 3, 8, 12, 32])
def test_matches_the_reference(bucket: int, shape: tuple[int, int], dtype: str) -> None:
    case(dtype, "cuda", bucket=bucket, shape=shape).check()
