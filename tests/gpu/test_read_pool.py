import pytest
import torch

from ouro_build.kernels.read_pool import MOST_PROGRAMS, read_pool
from tests.kernel_cases import PART
from tests.kernel_cases.read_pool import WORDS, case, total
from tests.kernel_harness import buffer, run_source


@pytest.mark.parametrize("words", WORDS)
def test_matches_the_reference(words: int) -> None:
    made = case(words, "cuda")
    programs = made.launch.grid[0]
    sums = made.check()["sums"]
    assert int(sums[:programs].sum(dtype=torch.int64)) % 2**32 == total(made)
    assert (sums[programs:] == -1).all()


def test_beyond_two_to_the_31_words() -> None:
    """The last words lie past what 32 bits address."""
    words = 2**31 + 8192 + 4
    if torch.cuda.mem_get_info()[0] < 5 * words:
        pytest.skip(f"needs {5 * words / 2**30:.0f} GiB of free device memory")
    made = case(8192, "cuda", multiprocessors=132)
    pool = torch.zeros(words, dtype=torch.int32, device="cuda")
    pool[-4:] = 7
    launch = read_pool(PART, pool=buffer("pool", "int32", words), sums=buffer("sums", "int32", MOST_PROGRAMS))
    sums = made.tensors["sums"]
    run_source(launch, {"pool": pool, "sums": sums})
    assert int(sums[: launch.grid[0]].sum()) == 28
