"""What may be drawn in place of what a step's launches ask multiprocessors for."""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.tuning import Residency
from ouro_build.kernels.candidates import changed_residency, residency_origins
from ouro_build.kernels.tuning import Residencies

KEYS = [("attention_decode", "grouped"), ("linear_few", "deep"), ("linear_few", "narrow"), ("linear_few", "tall"), ("rope", "")]


def residencies(count: int, carveout: int = 75, shared: int = 512) -> Residencies:
    made = (Residency(kernel=k, kind=kind, bits=16, rows=8, carveout=carveout, shared=shared) for k, kind in KEYS[:count])
    return {(r.kernel, r.kind): r for r in made}


@given(count=st.integers(1, 5), seed=st.integers(0, 1 << 32), most=st.integers(0, 40_000))
def test_a_change_keeps_the_launches_and_stays_within_what_a_block_may_have(count: int, seed: int, most: int) -> None:
    random, at = Random(seed), residencies(count, shared=0)
    for _ in range(8):
        at = changed_residency(at, most, random)
        assert list(at) == KEYS[:count]
        for key, asked in at.items():
            assert (asked.kernel, asked.kind, asked.bits, asked.rows) == (*key, 16, 8)
            assert asked.shared <= most
            assert msgspec.json.decode(msgspec.json.encode(asked), type=Residency) == asked, "within the bounds of a table"


def test_one_two_three_or_all_change_and_sometimes_all_get_one_carveout() -> None:
    random, current = Random(0), residencies(5)
    most, alike, drawn = find_part("h200").shared, 0, 1000
    counts: set[int] = set()
    values: set[tuple[int, int]] = set()
    for _ in range(drawn):
        other = changed_residency(current, most, random)
        counts.add(sum(other[key].shared != 512 for key in current))
        values |= {(asked.carveout, asked.shared) for asked in other.values()}
        alike += len({asked.carveout for asked in other.values()}) == 1
    assert counts == {1, 2, 3, 5}, "512 bytes are never drawn"
    assert 0.2 * drawn < alike < 0.35 * drawn
    assert {carveout for carveout, _ in values} == {-1, 0, 4, 10, 20, 30, 44, 56, 60, 68, 75, 82, 88, 100}
    assert max(shared for _, shared in values) == 32768


def test_the_same_seed_draws_the_same() -> None:
    one, other = Random(3), Random(3)
    for _ in range(20):
        assert changed_residency(residencies(4), 4096, one) == changed_residency(residencies(4), 4096, other)


def test_what_a_search_starts_from() -> None:
    now = residencies(3)
    first, *alike = residency_origins(now).values()
    assert first == now
    assert alike == [residencies(3, carveout, 0) for carveout in (-1, 100)]
