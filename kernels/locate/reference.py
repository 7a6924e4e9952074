"""Torch reference of `locate`."""

import torch
from torch import Tensor

from ouro_build.artifacts.rows import Row
from ouro_build.kernels.rows import active


def locate(rows: Tensor, inv_freq: Tensor, block_tables: Tensor, blocks: Tensor, rotation: Tensor, BLOCK_SIZE: int) -> None:
    """KV blocks and rotations of active rows; those that have no block become inactive."""
    live, _ = active(rows)
    positions, requests = rows[live, Row.POSITION].long(), rows[live, Row.REQUEST].long()
    blocks[live] = block_tables[requests, positions // BLOCK_SIZE]
    angles = positions.float()[:, None] * inv_freq
    rotation[live] = torch.stack((angles.cos(), angles.sin()), 1)
    rows[live[blocks[live] < 0], Row.SLOT] = -1
