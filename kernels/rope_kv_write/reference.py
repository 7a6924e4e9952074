"""Torch reference of `rope_kv_write`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate the halves of every head of x [rows, heads, head_dim] by the rows' positions, in float32; x's type again."""
    angles = positions.float()[:, None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_kv_write(
    rows: Tensor, qkv: Tensor, inv_freq: Tensor, block_tables: Tensor, kv: Tensor, q: Tensor, layer: int, LAYERS: int
) -> None:
    """Rotate active rows' queries into `q`, and their keys, with their values, into `kv`."""
    live, _ = active(rows)
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = kv.shape[3:5]
    positions, requests = rows[live, Row.POSITION].long(), rows[live, Row.REQUEST].long()
    planes = rows[live, Row.LOOP].long() * LAYERS + layer
    blocks = block_tables[requests, positions // block_size].long()
    x = qkv.view(len(qkv), -1, head_dim)[live]
    q[live] = rotate(x[:, :heads], positions, inv_freq)
    kv[planes, blocks, 0, :, positions % block_size] = rotate(x[:, heads : heads + kv_heads], positions, inv_freq)
    kv[planes, blocks, 1, :, positions % block_size] = x[:, heads + kv_heads :]
