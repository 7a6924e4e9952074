"""Torch reference of `silu_mul`."""

from torch import Tensor
from torch.nn.functional import silu

from ouro_build.kernels.rows import active


def silu_mul(rows: Tensor, gate_up: Tensor, out: Tensor) -> None:
    """`out[i] = silu(gate) * up` for active rows, of the halves of `gate_up[i]`."""
    live, _ = active(rows)
    gate, up = gate_up[live].chunk(2, -1)
    out[live] = silu(gate.float()).to(out.dtype) * up
