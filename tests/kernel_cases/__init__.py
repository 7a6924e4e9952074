"""Launches with the tensors they run on, shared by the interpreter's, the device's and the cross-compiling tests.

A module a kernel. Its `case(dtype, device, …)` builds a `Case`; slots and rows have holes, what is written starts poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Launch, LoadTimeValue
from tests.kernel_harness import DTYPES, check

PART = find_part("h200")
STACK = {"locate": 32}
"""Bytes of stack that are no spills: sine and cosine of Triton before 3.9 keep an array for angles no position reaches."""
OVER_ROWS = ("embedding", "residual_norm", "silu_mul", "locate", "rope_kv_write", "exit_gate", "argmax", "kv_copy")
"""Kernels whose modules here have a `case`."""
SLOTS = 7
ROWS = [3, -1, 0, 5]
"""State slots of the rows: a hole in the middle, slots out of order."""


@dataclass(frozen=True)
class Case:
    """A launch and everything it needs to run."""

    launch: Launch
    tensors: dict[str, Tensor]
    values: dict[LoadTimeValue, int] = field(default_factory=dict)

    def check(self) -> dict[str, Tensor]:
        """Compare the source with the reference; the source's buffers."""
        return check(self.launch, self.tensors, self.values)


def normal(device: str, dtype: str, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DTYPES[dtype]).to(device)


def ints(device: str, values: Sequence[object]) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def check_inactive(name: str, run: Callable[..., None], dtype: str, device: str = "cpu") -> None:
    """`run` must leave every buffer of the case of kernel `name` alone when no row is active."""
    case: Case = import_module(f"tests.kernel_cases.{name}").case(dtype, device)
    case.tensors["rows"].fill_(-1)
    before = {parameter: tensor.clone() for parameter, tensor in case.tensors.items()}
    run(case.launch, case.tensors, case.values)
    for parameter, tensor in case.tensors.items():
        torch.testing.assert_close(tensor, before[parameter], rtol=0, atol=0, equal_nan=True)
