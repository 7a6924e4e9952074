"""Matrices in blocks: nothing is lost, nothing but zeros is added, and any range can be read on its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ouro_build.artifacts.blocks import blocked_shape, to_blocks
from ouro_build.artifacts.packing import PackedTensor, SourceTensor, read_fused
from tests.unit.artifacts.blocks import from_blocks

SIZES = st.integers(1, 70)


def matrix(rows: int, columns: int, storage: str = "<u2") -> NDArray[np.generic]:
    """Elements that tell their places and are never zero."""
    return (np.arange(rows * columns) + 1).astype(storage).reshape(rows, columns)


@given(SIZES, st.integers(1, 140), st.sampled_from(["<u2", "<f4"]))
def test_unpacking_gives_the_matrix_and_the_rest_is_zero(rows: int, columns: int, storage: str) -> None:
    wanted = matrix(rows, columns, storage)
    blocks = to_blocks(wanted)
    np.testing.assert_array_equal(from_blocks(blocks, rows, columns), wanted)
    assert np.count_nonzero(blocks) == rows * columns


def test_a_block_is_rows_of_32_columns() -> None:
    blocks = to_blocks(matrix(32, 64)).reshape(blocked_shape(32, 64))
    np.testing.assert_array_equal(blocks[1, 1], matrix(32, 64)[16:, 32:])


@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 100), st.data())
def test_any_range_is_that_range_of_the_whole(heights: list[int], columns: int, data: st.DataObject) -> None:
    """Whatever sources make up the matrix, and wherever their rows meet."""
    whole = matrix(sum(heights), columns)
    parts = np.split(whole, np.cumsum(heights)[:-1])
    sources = tuple(SourceTensor(str(i), part.shape) for i, part in enumerate(parts))
    tensor = PackedTensor("x", "bfloat16", blocked_shape(*whole.shape), 0, sources, whole.shape)
    read = []

    def elements(name: str, start: int, stop: int) -> tuple[NDArray[np.generic], str]:
        read.append(stop - start)
        return parts[int(name)].reshape(-1)[start:stop], "bfloat16"

    start = data.draw(st.integers(0, tensor.elements - 1))
    stop = data.draw(st.integers(start + 1, tensor.elements))
    found = read_fused(elements, tensor, start, stop)
    np.testing.assert_array_equal(found, to_blocks(whole)[start:stop])
    assert sum(read) <= (stop - start) + 2 * tensor.band


@pytest.mark.parametrize("step", [7, 512, 1024, 5000])
def test_pieces_make_up_the_whole(step: int) -> None:
    whole = matrix(50, 70)
    tensor = PackedTensor("x", "bfloat16", blocked_shape(50, 70), 0, (SourceTensor("a", (50, 70)),), (50, 70))
    pieces = [
        read_fused(lambda _, a, b: (whole.reshape(-1)[a:b], "bfloat16"), tensor, at, min(at + step, tensor.elements))
        for at in range(0, tensor.elements, step)
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), to_blocks(whole))
