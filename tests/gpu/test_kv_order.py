"""Kernels that reach keys and values do so through strides: either order of planes and blocks, without compiling again."""

import pytest

from tests.kernel_cases import attention, kv_copy, rope_kv_write
from tests.kernel_cases.paged import Cache, check_orders

CACHES = (Cache(kv_heads=2, head_dim=32), Cache(kv_heads=2, head_dim=32, blocks_outer=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_rope_kv_write(dtype: str) -> None:
    check_orders(*(rope_kv_write.case(dtype, "cuda", cache=cache) for cache in CACHES))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_kv_copy(dtype: str) -> None:
    check_orders(*(kv_copy.case(dtype, "cuda", cache=cache) for cache in CACHES))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("shape", [(2, 2, 16), (4, 2, 32)])
def test_attention(shape: tuple[int, int, int], dtype: str) -> None:
    contexts = [attention.context(dtype, "cuda", *shape[1:], blocks_outer=outer) for outer in (False, True)]
    check_orders(*(attention.decode_case(dtype, "cuda", shape=shape, ctx=ctx) for ctx in contexts))
    check_orders(*(attention.prefill_case(dtype, "cuda", shape=shape, ctx=ctx) for ctx in contexts))
