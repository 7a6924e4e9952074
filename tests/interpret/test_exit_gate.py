import pytest
import torch

from tests.kernel_cases.exit_gate import LOOPS, SIZES, case
from tests.kernel_harness import row_records, run_source


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_reference(dtype: str, size: int) -> None:
    case(dtype, "cpu", size).check()


def test_probabilities_of_all_loops_sum_to_one() -> None:
    made = case("float32")
    for loop in range(LOOPS):
        made.tensors["rows"].copy_(row_records([2, -1, 6, -1, -1], loop=[loop] * 5))
        run_source(made.launch, made.tensors)
    torch.testing.assert_close(made.tensors["exit_probability"][[2, 6]].sum(-1), torch.ones(2))
