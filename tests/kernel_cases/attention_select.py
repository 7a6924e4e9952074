"""Selections from made-up scores: of several steps, with ties, infinities, zeros of both signs and scores that are all one."""

import torch
from torch import Tensor

from ouro_build.artifacts.retention import retained_counts
from ouro_build.kernels.attention_select import attention_select
from tests.kernel_cases import PART, Case, normal
from tests.kernel_harness import buffer, poisoned, row_records

KINDS = ("distinct", "ties", "few values", "one value", "zeros", "infinities", "tiny", "descending", "nothing", "outlier")
SLOTS, LAYERS, SPLITS = 5, 2, 3


def scores(kind: str, heads: int, width: int, device: str) -> Tensor:
    """float32 [heads, width]."""
    x = normal(device, "float32", heads, width, seed=5) * 3
    match kind:
        case "ties":
            return x.mul(8).round() / 8
        case "few values":
            return x.sign()
        case "one value":
            return torch.full_like(x, -2.5)
        case "zeros":
            return torch.where(x > 1, x, torch.where(x > 0, 0.0, -0.0))
        case "infinities":
            return torch.where(x > -1, x, float("-inf"))
        case "tiny":
            return x * 1e-40
        case "descending":
            return x.sort(1, descending=True).values
        case "nothing":
            return torch.full_like(x, float("-inf"))
        case "outlier":
            return torch.where(torch.arange(width, device=device) == width // 2, 1e30, x * 0)
    return x


def case(kind: str, device: str = "cpu", width: int = 4096, retention: float = 0.1, heads: int = 2) -> Case:
    """Rows of the whole width, of half of it and a score more, of half, of a quarter and a score more, of one; a hole.

    With a width that is a power of two, those are all scores that a program can hold, and where it holds fewer.
    """
    positions, slots = [width - 1, width // 2, -1, width // 2 - 1, width // 4, 0], [2, 0, -1, 3, 1, 4]
    bucket, capacity = len(positions), int(retained_counts(width, retention)[-1])
    place = (SLOTS, LAYERS, heads)
    buffers = {
        "rows": buffer("rows", "int32", bucket, 8),
        "counts": buffer("counts", "int32", bucket),
        "scores": buffer("scores", "float32", bucket, heads, width),
        "sums": buffer("sums", "float32", bucket, heads, SPLITS, 2),
        "retained_counts": buffer("retained_counts", "int32", width + 1),
        "reference_records": buffer("reference_records", "int32", SLOTS, LAYERS, 2),
        "reference_mass": buffer("reference_mass", "float32", *place),
        "reference_keys": buffer("reference_keys", "int32", *place, capacity),
    }
    tensors = {name: poisoned(found, device=device) for name, found in buffers.items()}
    tensors["rows"] = row_records(
        [0, 1, -1, 2, 3, 4], device, position=positions, reference_slot=slots, generation=[9, 8, -1, 7, 6, 5]
    )  # fmt: skip
    tensors["retained_counts"] = torch.from_numpy(retained_counts(width, retention).copy()).to(device)
    for row, position in enumerate(positions):
        n = position + 1
        tensors["scores"][row, :, :n] = scores(kind, heads, n, device)
        tensors["counts"][row] = count = min(SPLITS, n)
        tensors["sums"][row, :, :count] = _sums(tensors["scores"][row, :, :n], count)
    return Case(attention_select(PART, layer=1, **buffers), tensors)


def _sums(found: Tensor, count: int) -> Tensor:
    """[heads, count, 2]: (maximum, sum of exp(score - maximum)) of each of `count` splits of the scores."""
    sums = []
    for part in found.tensor_split(count, 1) if count else ():
        top = part.amax(1).clamp(min=-3e38)
        sums.append(torch.stack((top, torch.exp(part - top[:, None]).sum(1)), -1))
    return torch.stack(sums, 1) if sums else found.new_empty(len(found), 0, 2)
