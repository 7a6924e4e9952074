import pytest

from tests.kernel_cases import OVER_ROWS, check_inactive
from tests.kernel_harness import run_source
from tests.programs import Programs, check_inactive_rows


@pytest.mark.parametrize("name", OVER_ROWS)
def test_nothing_is_written(name: str) -> None:
    check_inactive(name, run_source, "float32")


def test_no_program_writes_what_no_active_row_has() -> None:
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(8,))
    for key in programs.keys:
        check_inactive_rows(programs, key, run_source)
