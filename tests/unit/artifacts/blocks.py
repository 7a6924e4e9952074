"""Matrices out of their blocks, written otherwise than they are put into them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.packing import PackedTensor


def from_blocks(blocks: NDArray[np.generic], rows: int, columns: int) -> NDArray[np.generic]:
    """The matrix [rows, columns] of stored elements, in any shape."""
    n, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    across = -(-columns // 32)
    return np.take(blocks.reshape(-1), ((n // 16 * across + k // 32) * 16 + n % 16) * 32 + k % 32)


def logical(tensor: PackedTensor, stored: NDArray[np.generic]) -> NDArray[np.generic]:
    """A packed tensor's stored elements as the model has them, a matrix in rows."""
    return stored.reshape(tensor.shape) if tensor.matrix is None else from_blocks(stored, *tensor.matrix)
