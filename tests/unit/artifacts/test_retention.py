import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.retention import counts_from_bytes, retained_counts


@given(st.integers(1, 5000), st.floats(1e-6, 1.0))
def test_the_rule_is_pythons_own_ceiling_of_the_float64_product(context: int, retention: float) -> None:
    counts = retained_counts(context, retention)
    assert counts.tolist() == [min(n, max(1, math.ceil(n * retention))) for n in range(context + 1)]


def test_known_counts() -> None:
    assert retained_counts(13, 0.1)[13] == 2
    assert retained_counts(100, 0.3)[[50, 90, 100]].tolist() == [15, 27, 30]
    assert retained_counts(65536, 1.0).tolist() == list(range(65537))
    assert retained_counts(4, 0.5).tolist() == [0, 1, 1, 2, 2]


def test_a_table_is_refused_that_is_not_as_long_as_the_context_or_retains_more_than_fits() -> None:
    raw = retained_counts(64, 0.5).tobytes()
    assert counts_from_bytes(raw, 64, 32).tolist() == retained_counts(64, 0.5).tolist()
    for context, capacity in ((63, 32), (64, 31)):
        with pytest.raises(ArtifactError, match=r"retention\.bin"):
            counts_from_bytes(raw, context, capacity)
    with pytest.raises(ArtifactError, match=r"retention\.bin"):
        counts_from_bytes(b"\xff" * 4 + raw[4:], 64, 32)
