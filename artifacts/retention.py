"""How many keys a sparse row retains, by the number that it has: a table that kernels look up and none of them computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError

RETENTION = "retention.bin"
"""The table as a file of the artifact: int32, little endian."""


def retained_counts(max_context: int, key_retention: float) -> NDArray[np.int32]:
    """int32 [max_context + 1]: entry n is min(n, max(1, ceil(n * key_retention))), the product in float64; entry 0 is 0."""
    keys = np.arange(max_context + 1, dtype=np.float64)
    counts: NDArray[np.int32] = np.minimum(keys, np.maximum(1, np.ceil(keys * key_retention))).astype("<i4")
    return counts


def counts_from_bytes(raw: bytes, max_context: int, capacity: int) -> NDArray[np.int32]:
    """The table in `raw`. Raises ArtifactError if it has not `max_context` + 1 entries, of 0 to `capacity` keys each."""
    if len(raw) != 4 * (max_context + 1):
        raise ArtifactError(f"{len(raw)} bytes, {4 * (max_context + 1)} expected", where=RETENTION)
    counts = np.frombuffer(raw, "<i4")
    if counts.min() < 0 or counts.max() > capacity:
        raise ArtifactError(f"counts {counts.min()} … {counts.max()}, 0 … {capacity} expected", where=RETENTION)
    return counts
