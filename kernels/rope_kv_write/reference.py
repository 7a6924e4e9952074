"""Torch reference of `rope_kv_write`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the halves of every head of x [rows, heads, head_dim] by `rotation` [rows, 2, half], in float32; in x's type."""
    cos, sin = rotation[:, None].unbind(2)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_kv_write(
    rows: Tensor, blocks: Tensor, rotation: Tensor, qkv: Tensor, kv: Tensor, q: Tensor, layer: int, LAYERS: int
) -> None:
    """Rotate active rows' queries into `q`, and their keys, with their values, into `kv`."""
    live, _ = active(rows)
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = kv.shape[3:5]
    at = rows[live, Row.POSITION].long() % block_size
    planes = rows[live, Row.LOOP].long() * LAYERS + layer
    x = qkv.view(len(qkv), -1, head_dim)[live]
    q[live] = rotate(x[:, :heads], rotation[live])
    kv[planes, blocks[live].long(), 0, :, at] = rotate(x[:, heads : heads + kv_heads], rotation[live])
    kv[planes, blocks[live].long(), 1, :, at] = x[:, heads + kv_heads :]
