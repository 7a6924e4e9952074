import pytest
import torch

from tests.kernel_cases.read_pool import WORDS, case, total


@pytest.mark.parametrize("words", WORDS)
def test_matches_the_reference(words: int) -> None:
    made = case(words, "cpu")
    programs = made.launch.grid[0]
    sums = made.check()["sums"]
    assert int(sums[:programs].sum(dtype=torch.int64)) % 2**32 == total(made)
    assert (sums[programs:] == -1).all()
