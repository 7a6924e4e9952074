import pytest

from tests.kernel_cases.locate import HALVES, case


@pytest.mark.parametrize("half", HALVES)
def test_matches_the_reference(half: int) -> None:
    case(device="cpu", half=half).check()
