"""Finding keys and values in the paged KV pool [planes, KV_BLOCKS, 2, kv_heads, block_size, head_dim].

A block of a plane is contiguous. Planes and blocks are reached through strides, so that either may be the outer one in
memory: the buffer's shape is in the order of memory, references are given a view with planes first.
"""

from ouro_build.artifacts.plan import Buffer


def page_shape(kv: Buffer) -> tuple[int, int, int]:
    """(kv_heads, block_size, head_dim) of a KV buffer. Only the number of blocks is left to load time."""
    _, kv_heads, block_size, head_dim = (d for d in kv.shape[2:] if isinstance(d, int))
    return kv_heads, block_size, head_dim
