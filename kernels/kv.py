"""The shape of a KV block, as launch rules need it."""

from __future__ import annotations

from ouro_build.artifacts.plan import Buffer


def kv_block(kv: Buffer) -> tuple[int, int, int]:
    """(kv_heads, block_size, head_dim) of `kv`: [planes, KV_BLOCKS, 2, kv_heads, block_size, head_dim]."""
    heads, block_size, head_dim = (d for d in kv.shape[3:] if isinstance(d, int))
    return heads, block_size, head_dim
