import pytest
from torch import Tensor

from ouro_build.artifacts.plan import Launch
from ouro_build.artifacts.rows import Row
from ouro_build.runtime.load_time import Values
from tests.kernel_cases import OVER_ROWS, check_inactive
from tests.kernel_harness import run_reference
from tests.programs import Programs, check_inactive_rows


@pytest.mark.parametrize("name", OVER_ROWS)
def test_nothing_is_written(name: str) -> None:
    check_inactive(name, run_reference, "float32")


def test_no_program_writes_what_no_active_row_has() -> None:
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(8,))
    for key in programs.keys:
        check_inactive_rows(programs, key, run_reference)


def test_a_program_that_takes_ended_rows_for_active_is_found() -> None:
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(8,))

    def every(launch: Launch, tensors: dict[str, Tensor], values: Values) -> None:
        run_reference(launch, tensors, values)
        if launch.specialization.kernel == "resolve":
            tensors["rows"][0] = tensors["row_state"][int(tensors["batch"][0])]
            tensors["rows"][0, Row.LOOP] = 1

    for key in programs.keys:
        with pytest.raises(AssertionError, match="which no active row has"):
            check_inactive_rows(programs, key, every)
