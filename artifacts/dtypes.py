"""Element types by name: their bytes, their numpy storage, and the pointer type Triton gives them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DType(NamedTuple):
    """`bytes` an element, `storage` the numpy type of the same width, `triton` the element's name in a signature."""

    bytes: int
    storage: np.dtype[np.generic]
    triton: str


def _entry(storage: str, triton: str) -> DType:
    kind: np.dtype[np.generic] = np.dtype(storage)
    return DType(kind.itemsize, kind, triton)


# numpy has no bfloat16: its bits are kept in uint16.
DTYPES: dict[str, DType] = {
    "bfloat16": _entry("<u2", "bf16"),
    "float16": _entry("<f2", "fp16"),
    "float32": _entry("<f4", "fp32"),
    "int32": _entry("<i4", "i32"),
    "int64": _entry("<i8", "i64"),
    "uint8": _entry("u1", "u8"),
}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor of `shape`."""
    count = 1
    for size in shape:
        count *= size
    return count * DTYPES[dtype].bytes
