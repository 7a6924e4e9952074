"""Torch reference of `linear_rope`."""

import torch
from torch import Tensor

from ouro_build.kernels.linear.reference import project
from ouro_build.kernels.rope_kv_write.reference import rope_kv_write


def linear_rope(
    rows: Tensor,
    x: Tensor,
    weight: Tensor,
    blocks: Tensor,
    rotation: Tensor,
    kv: Tensor,
    q: Tensor,
    layer: int,
    LAYERS: int,
) -> None:
    """`rope_kv_write` of the linear layer's output."""
    heads, head_dim = q.shape[1:]
    qkv = torch.empty((len(rows), (heads + 2 * kv.shape[3]) * head_dim), dtype=q.dtype, device=q.device)
    project(rows, x, weight, qkv, False)
    rope_kv_write(rows, blocks, rotation, qkv, kv, q, layer, LAYERS)
