"""The search for what launches ask multiprocessors for, over times that a test makes up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

from ouro_build.artifacts.tuning import Residency
from ouro_build.builder import tune_residency
from ouro_build.builder.tune_bench import Refused
from ouro_build.builder.tune_plans import Asked, Choice
from ouro_build.builder.tune_residency import ResidencySearch
from ouro_build.builder.tune_search import Found
from ouro_build.kernels.tuning import Residencies

Key = tuple[str, str]
State = Mapping[Key, tuple[int, int]]
"""(carve-out, bytes) by kernel and kind."""

FEW, MERGE, NORM, ROPE = ("linear_few", "deep"), ("attention_merge", ""), ("rms_norm", ""), ("linear_rope", "middle")
PLAIN: State = dict.fromkeys((FEW, MERGE, NORM, ROPE), (-1, 0))
MOST = 232448
BEFORE = 1000.0


def residencies(state: State) -> Residencies:
    return {
        (kernel, kind): Residency(kernel=kernel, kind=kind, bits=16, rows=1, carveout=carveout, shared=shared)
        for (kernel, kind), (carveout, shared) in state.items()
    }


def state_of(residency: Asked) -> dict[Key, tuple[int, int]]:
    return {(r.kernel, r.kind): (r.carveout, r.shared) for r in residency}


class Made:
    """Steps of as many microseconds as `cost` says of what their launches ask for, `now` where a step asks for nothing new; the
    first time only if it is `lucky`, `BEFORE` later. What `bad` says is refused."""

    def __init__(
        self,
        cost: Callable[[State], float],
        now: State = PLAIN,
        bad: Callable[[State], bool] = lambda state: False,
        lucky: bool = False,
    ) -> None:
        self.cost, self.now, self.bad, self.lucky = cost, now, bad, lucky
        self.compiled: list[Asked] = []
        self.measured: list[Asked] = []
        self.hopeless: list[float] = []

    def compile(self, choices: list[Choice], residency: Asked = ()) -> None:
        assert choices == [{}], "the kernels stay"
        self.compiled.append(residency)

    def microseconds(self, choice: Choice, hopeless: float = math.inf, residency: Asked = ()) -> float:
        assert not residency or residency in self.compiled, "measured before it was compiled"
        state = state_of(residency) if residency else self.now
        self.hopeless.append(hopeless)
        first = residency not in self.measured
        self.measured.append(residency)
        if residency and self.bad(state):
            raise Refused("made to be")
        return self.cost(state) if first or not self.lucky else BEFORE


def search(bench: Made, say: Callable[[str], None] = lambda text: None, most: int = MOST, had: Asked = ()) -> Found:
    before = Found(1200.0, BEFORE, carved_us=200.0, residency=had)
    return ResidencySearch(bench, {}, most, say).run(before, residencies(bench.now))


def pair_cost(state: State) -> float:
    """Faster only where two change."""
    return BEFORE - (100.0 if state[FEW][0] >= 56 and state[MERGE][1] >= 8192 else 0.0)


def sum_cost(state: State) -> float:
    """Each that has little L1 cache and some shared memory gains 0.2 %: too little to be kept alone."""
    return BEFORE - sum(2.0 for carveout, shared in state.values() if carveout > 50 and shared > 2048)


def test_two_that_are_faster_only_together_are_found() -> None:
    said: list[str] = []
    found = search(Made(pair_cost), said.append)
    assert (found.before_us, found.us, found.carved_us, found.resident_us) == (1200.0, 900.0, 200.0, 100.0)
    state = state_of(found.residency)
    assert pair_cost(state) == 900.0
    assert state.keys() == PLAIN.keys(), "all are written: none is left to other tables"
    assert said[-1].startswith("residency: 1000.0 µs a step before, 900.0 with linear_few deep ")


def test_small_gains_add_up() -> None:
    found = search(Made(sum_cost))
    assert (found.us, found.resident_us) == (992.0, 8.0)


@pytest.mark.parametrize(
    "bench",
    [
        Made(lambda state: BEFORE),
        Made(lambda state: 998.0 if state[FEW][0] == 100 else BEFORE),
        Made(lambda state: BEFORE - state[FEW][1] / 512, lucky=True),
        Made(lambda state: 500.0, bad=lambda state: True),
    ],
    ids=("nothing is faster", "less than the noise", "luck", "all is refused"),
)
def test_what_is_no_faster_leaves_what_there_was(bench: Made) -> None:
    had = tuple(residencies(PLAIN).values())
    found = search(bench, had=had)
    assert (found.us, found.residency, found.resident_us) == (BEFORE, had, 0.0)
    assert search(bench).residency == ()


def test_refused_trials_end_nothing_and_are_told() -> None:
    said: list[str] = []
    bench = Made(pair_cost, bad=lambda state: state[NORM][0] == 100 or state[MERGE][1] == 32768)
    found = search(bench, said.append)
    assert found.us == 900.0
    assert not bench.bad(state_of(found.residency))
    origin = "linear_few deep 100 %, attention_merge 100 %, rms_norm 100 %, linear_rope middle 100 %"
    assert f"residency: refused {origin}: made to be" in said
    counted = [line for line in said if " tried, " in line]
    assert [line.split(":")[0].removeprefix("residency from ") for line in counted] == [
        "as it is", "the driver's choice", "100 % for all"
    ]  # fmt: skip
    assert not any(", 0 refused" in line for line in counted)


def test_a_step_that_is_not_right_any_more_as_it_was_ends_it() -> None:
    class Wavering(Made):
        def microseconds(self, choice: Choice, hopeless: float = math.inf, residency: Asked = ()) -> float:
            if not residency:
                raise Refused("two runs leave different bits")
            return super().microseconds(choice, hopeless, residency)

    with pytest.raises(Refused, match="different bits"):
        search(Wavering(pair_cost))


@pytest.mark.parametrize("most", [0, 5000, 8192])
def test_no_block_gets_more_than_a_part_allows(most: int) -> None:
    bench = Made(pair_cost)
    found = search(bench, most=most)
    assert max(r.shared for residency in bench.measured for r in residency) == {0: 0, 5000: 4096, 8192: 8192}[most]
    assert found.us == (900.0 if most == 8192 else BEFORE)


def test_the_same_search_tries_the_same() -> None:
    one, other = Made(pair_cost), Made(pair_cost)
    assert search(one) == search(other)
    assert one.measured == other.measured


def test_every_origin_is_searched_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 100 % leads to is found from a step that is slower wherever it changes a little."""
    now: State = dict.fromkeys(PLAIN, (75, 1024))

    def cost(state: State) -> float:
        return BEFORE if state == now else 900.0 if all(c == 100 for c, _ in state.values()) else 1100.0

    monkeypatch.setattr(tune_residency, "TRIALS", 0)
    bench = Made(cost, now)
    found = search(bench)
    assert state_of(found.residency) == dict.fromkeys(PLAIN, (100, 0))
    origins = [now, PLAIN, dict.fromkeys(PLAIN, (100, 0))]
    assert [state_of(r) for r in bench.measured[:6]] == origins * 2, "at first, and in the end beside each other"
    assert bench.measured[6:] == [(), found.residency], "beside the step as it was"


def test_what_is_slower_than_the_best_so_far_is_not_measured_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_residency, "TRIALS", 40)
    bench = Made(lambda state: BEFORE)
    search(bench)
    assert bench.hopeless.count(math.inf) == 3 * 3 + 2, "the origins, after 30 changes, in the end; the best beside the step"
    assert set(bench.hopeless) == {math.inf, BEFORE}
    assert len(bench.measured) <= 3 * 3 + 2 + 3 * 40


class Paced(Made):
    """A device that needs `first` times as long for what it measures first of all."""

    def __init__(self, cost: Callable[[State], float], first: float) -> None:
        super().__init__(cost)
        self.first = first

    def microseconds(self, choice: Choice, hopeless: float = math.inf, residency: Asked = ()) -> float:
        us = super().microseconds(choice, hopeless, residency)
        return us * (self.first if len(self.measured) == 1 else 1.0)


def test_a_device_that_got_faster_makes_no_change_look_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_residency, "TRIALS", 20)
    bench = Paced(lambda state: BEFORE, 2.0)
    assert search(bench).residency == ()
    assert bench.hopeless.count(math.inf) == 3 + 2 + 3 + 2, "the origins, two for the first change, the end, two for the best"


def test_a_device_that_got_slower_hides_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first origin alone, which was measured while the device was fast."""
    monkeypatch.setattr(tune_residency, "residency_origins", lambda now: {"as it is": now})
    assert search(Paced(pair_cost, 0.5)).us == 900.0
