"""Reading paged keys and values in torch references."""

import torch
from torch import Tensor


def context(kv: Tensor, table: Tensor, plane: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions 0 .. length - 1 in float32, each [kv_heads, length, head_dim].

    kv [planes, blocks, 2, kv_heads, block_size, head_dim]; table int32: the request's KV blocks in order.
    """
    block_size = kv.shape[4]
    blocks = table[: -(-length // block_size)].long()
    # [blocks, 2, kv_heads, block_size, head_dim] -> [2, kv_heads, positions, head_dim]
    pages = kv[plane, blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    keys, values = pages.to(torch.float32)
    return keys, values
