"""Finding keys and values in the paged KV pool [planes, KV_BLOCKS, 2, kv_heads, block_size, head_dim]."""

from ouro_build.artifacts.plan import Buffer


def page_shape(kv: Buffer) -> tuple[int, int, int]:
    """(kv_heads, block_size, head_dim) of a KV buffer. Only the number of blocks is left to load time."""
    _, kv_heads, block_size, head_dim = (d for d in kv.shape[2:] if isinstance(d, int))
    return kv_heads, block_size, head_dim
