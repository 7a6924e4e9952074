"""The search for the scores that a row retains, against a stable sort, over scores made to mislead it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ouro_build.kernels.attention_select import source
from tests.interpret.search_kernel import search

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities: they are meant

Scores = NDArray[np.float32]
"""[n], as they are left to the search: none is NaN."""
Random = np.random.Generator
TILE = 128
WIDTH = 2 * TILE + 40
LIMIT_S = 10
"""A search takes some ten milliseconds here; one that does not end is to fail, not to hang."""
LOWEST = np.float32(-3e38)
"""What stands for the largest score where all are -inf."""
EDGES = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38, np.inf, -np.inf], np.float32)


class Form(NamedTuple):
    """How the search goes over scores of which there is room for `width`, at most `most` of them there."""

    held: bool
    width: int
    most: int


FORMS = {
    "held": Form(True, TILE, TILE),
    "held, the tile wider": Form(True, 40, 40),
    "held, the row wider": Form(True, WIDTH, TILE),
    "streamed": Form(False, WIDTH, WIDTH),
}


def normal(random: Random, n: int) -> Scores:
    return random.standard_normal(n).astype(np.float32)


def bit_patterns(random: Random, n: int) -> Scores:
    """Any float32; NaN is -inf before it comes to the search."""
    x = random.integers(-(2**31), 2**31, n).astype(np.int32).view(np.float32)
    return np.where(np.isnan(x), np.float32(-np.inf), x)


def one_of(random: Random, n: int, among: float, rest: float) -> Scores:
    """`among` once, `rest` elsewhere."""
    x = np.full(n, rest, np.float32)
    x[random.integers(n)] = among
    return x


KINDS: dict[str, Callable[[Random, int], Scores]] = {
    "normal": normal,
    "alike": lambda r, n: np.full(n, r.standard_normal(), np.float32),
    "constant": lambda r, n: np.full(n, r.choice([*EDGES[:-2], 1.0, -2.7]), np.float32),
    "zeros of both signs": lambda r, n: np.copysign(np.float32(0), normal(r, n)),
    "signs and zeros": lambda r, n: np.sign(np.trunc(normal(r, n) * 2)),
    "some -inf": lambda r, n: np.where(normal(r, n) > r.choice([-2, 0, 2]), normal(r, n), np.float32(-np.inf)),
    "some inf": lambda r, n: np.where(normal(r, n) > r.choice([-2, 0, 2]), normal(r, n), np.float32(np.inf)),
    "all -inf": lambda r, n: np.full(n, -np.inf, np.float32),
    "all inf": lambda r, n: np.full(n, np.inf, np.float32),
    "inf of both signs": lambda r, n: normal(r, n) * np.float32(np.inf),
    "one is no -inf": lambda r, n: one_of(r, n, r.standard_normal(), -np.inf),
    "denormal": lambda r, n: normal(r, n) * np.float32(1e-44),
    "huge": lambda r, n: normal(r, n) * np.float32(1e38),
    "edges": lambda r, n: r.choice(EDGES, n),
    "bit patterns": bit_patterns,
    "ties": lambda r, n: np.round(normal(r, n) * 4) / np.float32(4),
    "neighbours": lambda r, n: (1 + r.integers(0, 3, n) * 2.0**-23).astype(np.float32),
    "ascending": lambda r, n: np.sort(normal(r, n)),
    "descending": lambda r, n: -np.sort(normal(r, n)),
    "Cauchy": lambda r, n: r.standard_cauchy(n).astype(np.float32),
    "many magnitudes": lambda r, n: np.float32(r.choice([-1, 1])) * np.exp(normal(r, n) * 20),
    "one outlier": lambda r, n: one_of(r, n, r.choice([-1e30, 1e30]), 0.0),
    "two modes": lambda r, n: normal(r, n) + np.where(r.random(n) < r.choice([0.1, 0.5, 0.9]), np.float32(1e4), np.float32(0)),
}
COUNTS: dict[str, Callable[[Random, int], int]] = {
    "one": lambda r, n: 1,
    "two": lambda r, n: min(2, n),
    "a quarter": lambda r, n: max(1, n // 4),
    "all but one": lambda r, n: max(1, n - 1),
    "all": lambda r, n: n,
    "any": lambda r, n: int(r.integers(1, n + 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_finds_what_a_stable_sort_does(kind: str) -> None:
    @given(st.sampled_from(sorted(FORMS)), st.integers(1, WIDTH), st.sampled_from(sorted(COUNTS)), st.integers(0, 2**32 - 1))
    @settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # a smaller case is no clearer here
    def holds(form: str, most: int, count: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        n = min(most, FORMS[form].most)
        check(KINDS[kind](random, n), COUNTS[count](random, n), FORMS[form])

    holds()


@given(st.data(), st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from(EDGES.tolist()), min_size=1, max_size=40))
@settings(max_examples=30)
def test_finds_what_a_stable_sort_does_in_any_scores(data: st.DataObject, scores: list[float]) -> None:
    k, form = data.draw(st.integers(1, len(scores))), data.draw(st.sampled_from(sorted(FORMS)))
    check(np.array(scores, np.float32), k, FORMS[form])


@pytest.mark.parametrize("kind", ["normal", "alike", "neighbours", "descending"])
def test_guesses_find_it_without_halving(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so where they may leave what encloses the place: then the right result takes many times as many passes."""
    place_of, places = source.place_of, 0

    def counted(score: object) -> object:
        nonlocal places
        places += 1
        return place_of(score)

    monkeypatch.setattr(source, "place_of", counted)
    for seed in range(6):
        random, places = np.random.default_rng(seed), 0
        check(KINDS[kind](random, 100), 25, FORMS["held"])
        assert 0 < places - 1 <= source.GUESSES.value, seed  # one is the largest score's


def check(x: Scores, k: int, form: Form) -> None:
    """The search must find the `k` that come first when `x` is sorted, of equal ones the first.

    It must call a threshold exact if, and only if, it is; where it is not, some of those equal to it are wanted.
    """
    assert x.dtype == np.float32
    threshold, exact, ties = searched(x, k, form)
    above, equal = np.flatnonzero(x > threshold), np.flatnonzero(x == threshold)
    assert exact == (len(above) + len(equal) == k), (threshold, exact, ties)
    assert exact or 0 < ties < len(equal), (threshold, ties)
    found = np.union1d(above, equal if exact else equal[:ties])
    expected = np.sort(np.argsort(-x, kind="stable")[:k])
    assert found.tolist() == expected.tolist(), (threshold, exact, ties)


def searched(x: Scores, k: int, form: Form) -> tuple[np.float32, bool, int]:
    """(threshold, exact, ties) of scores past which there is what no search may look at."""
    scores = torch.full((form.width,), float("nan"))
    scores[len(x) :: 2] = float("inf")
    scores[: len(x)] = torch.from_numpy(x)
    top = torch.tensor([max(x.max(), LOWEST)])
    threshold, found = torch.full((1,), float("nan")), torch.full((2,), -1, dtype=torch.int32)
    with ended():
        search[(1,)](scores, top, threshold, found, len(x), k, form.width, TILE, form.held)
    exact, ties = found.tolist()
    return np.float32(threshold.item()), bool(exact), ties


@contextmanager
def ended() -> Iterator[None]:
    """Fail where what is within has not ended after `LIMIT_S`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the search has not ended after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
