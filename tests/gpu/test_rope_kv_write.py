import pytest

from tests.kernel_cases.rope_kv_write import LONG, SHAPES, case, check_far_blocks, check_far_planes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(dtype: str, shape: tuple[int, int, int]) -> None:
    case(dtype, "cuda", shape).check()


def test_late_positions() -> None:
    case("float32", "cuda", (1, 1, 16), LONG, last_position=65535).check()


def test_planes_beyond_31_bits_of_elements() -> None:
    check_far_planes("cuda")


def test_blocks_beyond_31_bits_of_elements() -> None:
    check_far_blocks("cuda")
