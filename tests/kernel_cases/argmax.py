import torch
from torch import Tensor

from ouro_build.kernels.argmax import argmax
from tests.kernel_cases import PART, Case, normal
from tests.kernel_harness import buffer, poisoned, row_records

VOCABULARIES = (5, 64, 1000, 9001)


def logits(dtype: str, device: str, vocabulary: int) -> Tensor:
    """Rows: plain, ties far apart, unread, NaN but for the last, only NaN and -inf, only NaN, zeros of both signs."""
    nan, inf = float("nan"), float("inf")
    x = normal(device, dtype, 7, vocabulary)
    x[1, [1, vocabulary // 2, -1]] = 50.0
    x[3] = nan
    x[3, -1] = -3.0
    x[4] = nan
    x[4, [2, -1]] = -inf
    x[5] = nan
    x[6] = -0.0
    x[6, 1:] = 0.0
    return x


def expected(vocabulary: int) -> list[int]:
    """Tokens of the rows after the first; -1 stays where no row is."""
    return [1, -1, vocabulary - 1, 2, 0, 0]


def case(dtype: str, device: str = "cpu", vocabulary: int = 64) -> Case:
    tokens = buffer("tokens", "int32", 9)
    launch = argmax(PART, rows=buffer("rows", "int32", 7, 8), logits=buffer("logits", dtype, 9, vocabulary), tokens=tokens)
    x = torch.cat((logits(dtype, device, vocabulary), normal(device, dtype, 2, vocabulary)))
    rows = row_records([0, 1, -1, 3, 2, 6, 5], device)
    return Case(launch, {"rows": rows, "logits": x, "tokens": poisoned(tokens, device=device)})
