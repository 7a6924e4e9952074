"""The linear kernels on a device, compiled."""

import pytest

from tests.kernel_cases.linear import SHAPES, case

DTYPES = ["bfloat16", "float16", "float32"]
WIDE = (*SHAPES, (513, 96), (2048, 2048), (2048, 5632), (6144, 2048))
BUCKETS = [("linear_few", b) for b in (1, 2, 3, 4, 8, 16, 32)] + [("linear_many", b) for b in (5, 40, 64, 200, 512)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize(("name", "bucket"), BUCKETS)
def test_matches_the_reference(name: str, bucket: int, shape: tuple[int, int], dtype: str) -> None:
    if name == "linear_few" and dtype == "float32" and bucket > 8:
        pytest.skip("linear sends so many float32 rows to linear_many")
    case(name, dtype, "cuda", bucket=bucket, shape=shape).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "bucket"), [("linear_few", 2), ("linear_few", 8), ("linear_many", 70)])
def test_gathers_by_slot_into_float32(name: str, bucket: int, dtype: str) -> None:
    case(name, dtype, "cuda", bucket=bucket, shape=(513, 96), out_dtype="float32", gather=True).check()


@pytest.mark.parametrize(("name", "bucket"), [("linear_few", 1), ("linear_few", 16), ("linear_many", 512)])
def test_the_same_input_gives_the_same_bits(name: str, bucket: int) -> None:
    first, second = (case(name, "bfloat16", "cuda", bucket=bucket, shape=(2048, 2048)).check() for _ in range(2))
    assert first["out"].nan_to_num(7.0).equal(second["out"].nan_to_num(7.0))
