import msgspec
import torch

from ouro_build.kernels.read_pool import MOST_PROGRAMS, read_pool
from tests.kernel_cases import PART, Case
from tests.kernel_harness import buffer, poisoned

WORDS = (4, 8192, 5 * 8192 + 1028, 9 * 8192)
"""A part of a block, one block, a last turn that is not full, and turns of several programs."""


def case(words: int, device: str = "cpu", multiprocessors: int = 1) -> Case:
    """Words of any value, so that sums wrap, read on a part of `multiprocessors`."""
    generator = torch.Generator().manual_seed(words)
    pool = torch.randint(-(2**31), 2**31, (words,), generator=generator, dtype=torch.int64).to(torch.int32).to(device)
    part = msgspec.structs.replace(PART, sm_count=multiprocessors)
    sums = buffer("sums", "int32", MOST_PROGRAMS)
    launch = read_pool(part, pool=buffer("pool", "int32", words), sums=sums)
    return Case(launch, {"pool": pool, "sums": poisoned(sums, device=device)})


def total(case: Case) -> int:
    """What the partial sums must add up to, modulo 2^32."""
    return int(case.tensors["pool"].sum(dtype=torch.int64)) % 2**32
