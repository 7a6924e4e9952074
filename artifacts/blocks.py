"""The order in which the weights pool holds a matrix: blocks of 16 rows and 32 columns.

Shape [rows / 16, columns / 32, 16, 32], both rounded up, row-major, zeros where a block reaches past the matrix: a block is
contiguous, and the blocks of a band of 16 rows follow each other along the columns. What a warp's 16-byte loads of some rows
and 32 columns bring is then whole lines one after another, for any tile that the kernels take. 16 rows and 32 columns of
half-width elements are what a warp holds as an operand of two steps on tensor cores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 16
"""Rows of a block. Its bands stand one after another, so a range of them comes from the same rows of the matrix."""
BLOCK_COLUMNS = 32
"""Columns of a block."""


def blocked_shape(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Shape in which a matrix [rows, columns] is stored."""
    return -(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS), BLOCK_ROWS, BLOCK_COLUMNS


def to_blocks(matrix: NDArray[np.generic]) -> NDArray[np.generic]:
    """The stored elements, in one dimension, of `matrix` [rows, columns]."""
    bands, across, tall, wide = blocked_shape(*matrix.shape)
    whole = (bands * tall, across * wide)
    if matrix.shape != whole:
        padded = np.zeros(whole, matrix.dtype)
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        matrix = padded
    # A row of a block is moved as one opaque item: twice as fast as by elements.
    lines = np.ascontiguousarray(matrix).view(f"V{wide * matrix.itemsize}").reshape(bands, tall, across)
    return np.ascontiguousarray(lines.transpose(0, 2, 1)).reshape(-1).view(matrix.dtype)
