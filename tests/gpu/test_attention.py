"""The attention kernels on a device, compiled."""

import pytest
import torch

from tests.kernel_cases import Case
from tests.kernel_cases.attention import (
    DECODE_ROWS,
    LAYERS,
    LOOPS,
    PREFILL_ROWS,
    SHAPES,
    WORST,
    Context,
    context,
    decode_case,
    merge_case,
    merged,
    no_split_case,
    prefill_case,
)
from tests.kernel_cases.paged import kv_values
from tests.kernel_harness import run_reference, run_source

DTYPES = ["bfloat16", "float16", "float32"]
LONG_ROWS = (None, (0, 2999, 2), (1, 1500, 0), (0, 0, 1), (1, 63, 1), (0, 64, 0))
LONG_CHUNK = (*((0, p, 2) for p in range(2300, 2500)), None, *((1, p, 1) for p in range(1000, 1100)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_matches_the_reference(shape: tuple[int, int, int], dtype: str) -> None:
    for least in (1, 3, 40):
        decode_case(dtype, "cuda", shape=shape, least=least).check()


@pytest.mark.parametrize("rest", [0, -1, WORST])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 16)])
def test_records_of_no_split_may_hold_anything(shape: tuple[int, int, int], multiprocessors: int, rest: int) -> None:
    no_split_case("bfloat16", "cuda", shape, rest, multiprocessors).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_matches_the_reference(shape: tuple[int, int, int], dtype: str) -> None:
    prefill_case(dtype, "cuda", shape=shape).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16, 128), (8, 2, 128), (4, 4, 64)])
def test_long_contexts(shape: tuple[int, int, int], dtype: str) -> None:
    ctx = context(dtype, "cuda", shape[1], shape[2], lengths=(3000, 1600))
    decode_case(dtype, "cuda", shape=shape, rows=LONG_ROWS, least=33, ctx=ctx).check()
    prefill_case(dtype, "cuda", shape=shape, rows=LONG_CHUNK, ctx=ctx).check()


@pytest.mark.parametrize("shape", [(2, 2, 64), (4, 2, 64)])
def test_any_block_size(shape: tuple[int, int, int]) -> None:
    for block_size in (1, 12, 48, 128):
        prefill_case("bfloat16", "cuda", shape=shape, block_size=block_size).check()


@pytest.mark.parametrize("block_size", [8, 48, 128])
@pytest.mark.parametrize(("shape", "dtype"), [((2, 2, 64), "bfloat16"), ((4, 2, 64), "bfloat16"), ((2, 2, 64), "float32")])
def test_blocks_of_eights(shape: tuple[int, int, int], dtype: str, block_size: int) -> None:
    decode_case(dtype, "cuda", shape=shape, block_size=block_size).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16, 128), (4, 4, 64)])
def test_captures_leave_the_bits_of_dense_attention(shape: tuple[int, int, int], dtype: str) -> None:
    """Before anything is rounded, where splits are of several tiles."""
    ctx = context(dtype, "cuda", shape[1], shape[2], lengths=(3000, 1600))
    for least in (1, 5):
        cases = [decode_case(dtype, "cuda", shape, LONG_ROWS, least, ctx=ctx, capture=capture) for capture in (False, True)]
        for case in cases:
            run_source(case.launch, case.tensors, case.values)
        for name in ("partial", "sums"):
            dense, captured = (case.tensors[name].view(torch.int32) for case in cases)
            assert captured.equal(dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "head_dim"), [(1, 16), (5, 32), (33, 128)])
def test_merge_matches_the_reference(splits: int, head_dim: int, dtype: str) -> None:
    merge_case(dtype, "cuda", heads=2, splits=splits, head_dim=head_dim).check()


@pytest.mark.parametrize(("dtype", "close"), [("float32", 2e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 32), (2, 2, 128)])
def test_decode_and_merge_give_what_prefill_gives(shape: tuple[int, int, int], dtype: str, close: float) -> None:
    decode = decode_case(dtype, "cuda", shape=shape)
    run_source(decode.launch, decode.tensors, decode.values)
    merge = merged(decode, dtype, "cuda")
    run_source(merge.launch, merge.tensors)
    prefill = prefill_case(dtype, "cuda", shape=shape, rows=DECODE_ROWS)
    run_reference(prefill.launch, prefill.tensors, prefill.values)
    torch.testing.assert_close(merge.tensors["out"], prefill.tensors["out"], atol=close, rtol=close, equal_nan=True)


def far_twin(near: Context) -> Context:
    """The same context with each block moved past 2^31 elements and 4 GiB of its own plane; only its blocks are filled."""
    planes, blocks, *block = near.kv.shape
    skip = 2**31 // torch.Size(block).numel() + 1
    count = skip + blocks
    kv = torch.empty((planes, count, *block), dtype=near.kv.dtype, device="cuda")
    kv[:, skip:] = near.kv
    tables = torch.where(near.tables >= 0, near.tables + skip, near.tables)
    return Context(kv, tables, near.kv_buffer, kv_values(kv))


@pytest.mark.parametrize("shape", [(4, 4, 128), (8, 2, 128)])
def test_blocks_beyond_2_31_elements_and_4_gib(shape: tuple[int, int, int]) -> None:
    needed = LAYERS * LOOPS * (2**31 + 2**22) * 2
    if torch.cuda.mem_get_info()[0] < 1.2 * needed:
        pytest.skip(f"needs {1.2 * needed / 2**30:.0f} GiB of free device memory")
    near = context("bfloat16", "cuda", shape[1], shape[2])
    far = far_twin(near)
    for make, rows in ((decode_case, DECODE_ROWS), (prefill_case, PREFILL_ROWS)):
        want, got = (_run(make("bfloat16", "cuda", shape=shape, rows=rows, ctx=c)) for c in (near, far))
        for name in want.launch.named().keys() & {"partial", "sums", "out"}:
            assert got.tensors[name].view(torch.uint8).equal(want.tensors[name].view(torch.uint8))
    del far
    torch.cuda.empty_cache()


def _run(c: Case) -> Case:
    run_source(c.launch, c.tensors, c.values)
    return c
