"""The attention kernels against their references, and decode and prefill against each other."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.errors import BuildError
from ouro_build.artifacts.parts import PARTS, Part, find_part
from ouro_build.kernels.attention_decode import split_rule
from tests.kernel_cases import Case
from tests.kernel_cases.attention import (
    DECODE_ROWS,
    PREFILL_ROWS,
    SHAPES,
    WORST,
    Rows,
    decode_case,
    merge_case,
    merged,
    no_split_case,
    prefill_case,
)
from tests.kernel_harness import run_reference, run_source

DTYPES = ["float32", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_matches_the_reference(shape: tuple[int, int, int], dtype: str) -> None:
    decode_case(dtype, shape=shape).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_matches_the_reference(shape: tuple[int, int, int], dtype: str) -> None:
    prefill_case(dtype, shape=shape).check()


@pytest.mark.parametrize("shape", [(2, 2, 16), (4, 2, 16)])
def test_any_block_size(shape: tuple[int, int, int]) -> None:
    for block_size in (1, 12, 48, 128):
        prefill_case("float32", shape=shape, block_size=block_size).check()


@pytest.mark.parametrize("block_size", [8, 48, 128])
@pytest.mark.parametrize(("shape", "dtype"), [((2, 2, 16), "float32"), ((4, 2, 16), "float32"), ((2, 2, 32), "float16")])
def test_blocks_of_eights(shape: tuple[int, int, int], dtype: str, block_size: int) -> None:
    decode_case(dtype, shape=shape, block_size=block_size).check()


def test_other_blocks_are_refused() -> None:
    with pytest.raises(BuildError, match="12 tokens"):
        decode_case("float32", shape=(2, 2, 16), block_size=12)


@pytest.mark.parametrize("rest", [0, -1, WORST])
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("shape", [(4, 4, 16), (4, 4, 32), (6, 2, 16)])
def test_records_of_no_split_may_hold_anything(shape: tuple[int, int, int], multiprocessors: int, rest: int) -> None:
    no_split_case("float16", "cpu", shape, rest, multiprocessors).check()


@pytest.mark.parametrize("shape", [(4, 4, 16), (2, 2, 32)])
def test_captures_leave_the_bits_of_dense_attention(shape: tuple[int, int, int]) -> None:
    cases = [decode_case("float16", shape=shape, least=1, capture=capture) for capture in (False, True)]
    for case in cases:
        run_source(case.launch, case.tensors, case.values)
        assert case.launch.specialization.options.fusion is False, "compilers fuse products with sums as they like"
    for name in ("partial", "sums"):
        dense, captured = (case.tensors[name].view(torch.int32) for case in cases)
        assert captured.equal(dense)


@pytest.mark.parametrize("least", [1, 2, 7])
def test_any_number_of_splits(least: int) -> None:
    decode_case("float16", shape=(2, 2, 32), least=least).check()
    decode_case("float16", shape=(6, 2, 32), least=least).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "head_dim"), [(1, 16), (5, 32), (33, 128)])
def test_merge_matches_the_reference(splits: int, head_dim: int, dtype: str) -> None:
    merge_case(dtype, "cpu", heads=2, splits=splits, head_dim=head_dim).check()


@pytest.mark.parametrize(("dtype", "close"), [("float32", 2e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 32), (2, 2, 128)])
def test_decode_and_merge_give_what_prefill_gives(shape: tuple[int, int, int], dtype: str, close: float) -> None:
    decode = decode_case(dtype, "cpu", shape=shape)
    run_source(decode.launch, decode.tensors, decode.values)
    merge = merged(decode, dtype, "cpu")
    run_source(merge.launch, merge.tensors)
    prefill = prefill_case(dtype, "cpu", shape=shape, rows=DECODE_ROWS)
    run_reference(prefill.launch, prefill.tensors, prefill.values)
    torch.testing.assert_close(merge.tensors["out"], prefill.tensors["out"], atol=close, rtol=close, equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 2, 16), (4, 2, 16)])
@pytest.mark.parametrize(("make", "rows"), [(decode_case, DECODE_ROWS), (prefill_case, PREFILL_ROWS)])
def test_a_row_does_not_depend_on_its_neighbours(make: Callable[..., Case], rows: Rows, shape: tuple[int, int, int]) -> None:
    """Bit for bit, though a neighbour's keys are NaN: request 1 is attended alone, then beside damaged others."""
    together = make("float16", shape=shape)
    alone = make("float16", shape=shape, rows=tuple(row if row and row[0] == 1 else None for row in rows))
    others = together.tensors["block_tables"][[0, 2]]
    together.tensors["kv"][:, others[others >= 0].long()] = float("nan")
    mine = [i for i, row in enumerate(rows) if row is not None and row[0] == 1]
    for c in (together, alone):
        run_source(c.launch, c.tensors, c.values)
    if make is decode_case:
        together, alone = (merged(c, "float16", "cpu") for c in (together, alone))
        for c in (together, alone):
            run_source(c.launch, c.tensors)
    got, want = (c.tensors["out"][mine].contiguous() for c in (together, alone))
    assert got.view(torch.uint8).equal(want.view(torch.uint8))


@given(
    st.integers(1, 512), st.integers(1, 64), st.sampled_from([1, 4]), st.integers(1, 1 << 17), st.integers(1, 1 << 17),
    st.sampled_from(PARTS),
)  # fmt: skip
@settings(max_examples=200)
def test_splits_cover_a_context(bucket: int, kv_heads: int, group: int, keys: int, more: int, part: Part) -> None:
    rule = split_rule(part, bucket, group * kv_heads, kv_heads, 128, "bfloat16")
    count, span = rule.count(keys), rule.span(keys)
    assert 1 <= count <= -(-keys // rule.tile)
    assert span * (count - 1) < keys <= span * count, "the last split has no keys, or too many"
    assert span % 8 == 0
    assert count <= rule.most(keys + more)


def test_a_lone_row_fills_the_device() -> None:
    h200 = find_part("h200")
    programs = 16 * split_rule(h200, 1, 16, 16, 128, "bfloat16").count(4096)
    assert programs + 16 > h200.sm_count, "one more split of each head would not run beside the others"
    assert split_rule(h200, 64, 16, 16, 128, "bfloat16").count(1024) == 1
    assert split_rule(h200, 64, 16, 16, 128, "bfloat16").count(32768) == 4, "a long row beside short ones"
