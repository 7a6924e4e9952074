import pytest

from tests.kernel_cases import OVER_ROWS, check_inactive
from tests.kernel_harness import run_source


@pytest.mark.parametrize("name", OVER_ROWS)
def test_nothing_is_written(name: str) -> None:
    check_inactive(name, run_source, "float32")
