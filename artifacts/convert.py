"""Weights from one element type to another, bit by bit, so that every machine gives the same bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WEIGHT_DTYPES = ("bfloat16", "float32")
"""Element types that weights may have, in a checkpoint and in an artifact."""

_QUIET = np.uint32(0x00400000)


def convert(values: NDArray[np.generic], stored: str, wanted: str) -> NDArray[np.generic]:
    """`values` (storage of `stored`) as storage of `wanted`; both one of WEIGHT_DTYPES. The same array if they are equal."""
    if stored == wanted:
        return values
    return _widen(values) if wanted == "float32" else _narrow(values)


def _widen(bits: NDArray[np.generic]) -> NDArray[np.generic]:
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def _narrow(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN, and what is too large becomes infinite."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(nan, bits | _QUIET, rounded) >> np.uint32(16)).astype("<u2")
