"""The search for configurations, over times that a test makes up."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.tuning import Fragments, Parameters, Queries, Splits, Tile
from ouro_build.builder.tune_bench import Refused
from ouro_build.builder.tune_plans import Asked, Choice
from ouro_build.builder.tune_search import Search
from ouro_build.kernels.candidates import carved, configuration, neighbours
from ouro_build.kernels.sites import Site, attention_site

H200 = find_part("h200")
DEEP = Site("linear_few", 16, 8, (2048, 5632), "deep")
NARROW = Site("linear_few", 16, 8, (2048, 2048), "narrow")
FORMS: tuple[Parameters, ...] = (
    Fragments(block_n=16, warps=8, step=64, ahead=6, x_ahead=6, maxnreg=168),
    Tile(m=64, n=64, k=64, warps=4, stages=3),
    Splits(tile_bytes=16384, warps=8, programs=2, longest=16, shortest=4, stages=3, maxnreg=128),
    Queries(rows=64, tile=64, warps=4, stages=3),
)


class Made:
    """Steps of 1,000 µs, fewer for each entry of `faster` that they have; what `bad` says is refused."""

    def __init__(self, faster: dict[tuple[Site, str, int], float], bad: tuple[str, int] = ("", 0), lucky: bool = False) -> None:
        self.faster, self.bad, self.lucky = faster, bad, lucky
        self.compiled: list[Choice] = []
        self.measured: list[Choice] = []
        self.hopeless: list[float] = []

    def compile(self, choices: list[Choice], residency: Asked = ()) -> None:
        self.compiled += choices

    def microseconds(self, choice: Choice, hopeless: float = math.inf, residency: Asked = ()) -> float:
        self.hopeless.append(hopeless)
        assert choice in self.compiled, "measured before it was compiled"
        if any(getattr(p, self.bad[0], None) == self.bad[1] for p in choice.values()):
            raise Refused("made to be")
        first = choice not in self.measured
        self.measured.append(choice)
        gains = [us for (site, name, value), us in self.faster.items() if getattr(choice[site], name) == value]
        return 1000.0 - (sum(gains) if first or not self.lucky else 0.0)


def search(bench: Made, *sites: Site) -> Search:
    return Search(bench, H200, [(site, 24) for site in sites], lambda text: None)


@pytest.mark.parametrize("current", FORMS)
def test_neighbours_are_one_change_away_and_return(current: Parameters) -> None:
    near = neighbours(current)
    assert len(near) == len(set(near)) > 8
    assert current not in near
    for other in near:
        changed = [n for n in current.__struct_fields__ if getattr(current, n) != getattr(other, n)]
        assert 1 <= len(changed) <= 2
        again = msgspec.json.decode(msgspec.json.encode(other), type=type(other))
        assert again == other, "within the bounds of its form"
        assert "carveout" not in changed, "a step's kernels change it together"


@given(st.data())
def test_walks_among_neighbours_stay_within_bounds(data: st.DataObject) -> None:
    at = data.draw(st.sampled_from(FORMS))
    for _ in range(4):
        at = data.draw(st.sampled_from(neighbours(at)))
        assert msgspec.json.decode(msgspec.json.encode(at), type=type(at)) == at


def test_changes_that_make_the_step_faster_are_kept_and_add_up() -> None:
    bench = Made({(DEEP, "step", 128): 50.0, (DEEP, "maxnreg", 255): 20.0, (NARROW, "warps", 4): 30.0})
    found = search(bench, DEEP, NARROW).run()
    assert (found.before_us, found.us) == (1000.0, 900.0)
    deep, narrow = found.places
    assert isinstance(deep.parameters, Fragments)
    assert (deep.parameters.step, deep.parameters.maxnreg) == (128, 255)
    assert getattr(narrow.parameters, "warps", 0) == 4
    assert (deep.gained, narrow.gained) == (70.0, 30.0)
    assert found.choice() == {DEEP: deep.parameters, NARROW: narrow.parameters}
    assert (found.residency, found.resident_us) == ((), 0.0)
    entry = found.entries()[0]
    assert (entry.sizes, entry.rows, entry.kind, entry.parameters) == (DEEP.sizes, 8, "", deep.parameters)
    assert entry.measured is not None
    assert (entry.measured.before_us, entry.measured.us, entry.measured.launches) == (970.0, 900.0, 24)


def test_a_carveout_is_tried_for_all_places_together_and_no_place_gained_it() -> None:
    together = {(DEEP, "carveout", 75): 60.0, (NARROW, "carveout", 75): 40.0, (DEEP, "carveout", 50): 10.0}
    bench = Made(together | {(DEEP, "step", 128): 50.0})
    found = search(bench, DEEP, NARROW).run()
    assert (found.before_us, found.us, found.carved_us) == (1000.0, 850.0, 100.0)
    assert [(getattr(p.first, "carveout", 0), getattr(p.parameters, "carveout", 0)) for p in found.places] == [(-1, 75)] * 2
    assert [p.gained for p in found.places] == [50.0, 0.0]
    assert sum(p.gained for p in found.places) + found.carved_us == found.before_us - found.us
    assert all({getattr(p, "carveout", 0) for p in choice.values()} <= {c} for choice, c in carveouts(bench))
    measured = [entry.measured for entry in found.entries()]
    assert [(m.before_us, m.us) for m in measured if m] == [(900.0, 850.0), (850.0, 850.0)]


def carveouts(bench: Made) -> list[tuple[Choice, int]]:
    """What was measured, each with the carve-out of its first place."""
    return [(choice, getattr(next(iter(choice.values())), "carveout", 0)) for choice in bench.measured]


def test_a_carveout_that_gains_less_than_the_noise_or_by_luck_is_not_kept() -> None:
    for bench in (Made({(DEEP, "carveout", 75): 2.0}), Made({(DEEP, "carveout", 75): 60.0}, lucky=True)):
        found = search(bench, DEEP).run()
        assert (found.places[0].parameters, found.carved_us) == (found.places[0].first, 0.0)


def test_a_carveout_that_is_refused_ends_nothing() -> None:
    said: list[str] = []
    bench = Made({(DEEP, "carveout", 100): 60.0, (DEEP, "carveout", 75): 30.0}, bad=("carveout", 100))
    found = Search(bench, H200, [(DEEP, 24)], said.append).run()
    assert (found.carved_us, getattr(found.places[0].parameters, "carveout", 0)) == (30.0, 75)
    assert "carve-outs: refused 100 %: made to be" in said
    assert "carve-outs: 2 tried, 1 refused, 970.0 µs a step" in said


def test_a_step_starts_from_the_carveouts_that_it_has() -> None:
    current = {DEEP: FORMS[0], NARROW: msgspec.structs.replace(FORMS[0], carveout=100)}
    assert [[getattr(p, "carveout", 0) for p in c.values()] for c in carved(current)] == [[c, c] for c in (-1, 50, 75, 100)]
    assert len(carved({NARROW: current[NARROW]})) == 3
    assert carved({DEEP: FORMS[1], NARROW: FORMS[3]}) == ()


def test_what_is_slower_than_the_best_so_far_is_not_measured_long() -> None:
    bench = Made({(DEEP, "step", 128): 50.0})
    found = search(bench, DEEP).run()
    assert bench.hopeless[0] == math.inf, "the step as it was"
    assert set(bench.hopeless) == {math.inf, 1000.0, found.us}


def test_what_is_faster_once_only_is_luck() -> None:
    found = search(Made({(DEEP, "step", 128): 50.0}, lucky=True), DEEP).run()
    assert found.us == found.before_us
    assert found.places[0].parameters == found.places[0].first == configuration(H200, DEEP)


def test_less_than_the_noise_changes_nothing() -> None:
    found = search(Made({(DEEP, "step", 128): 2.0}), DEEP).run()
    assert found.places[0].parameters == found.places[0].first


def test_what_is_refused_is_counted_and_never_chosen() -> None:
    found = search(Made({(DEEP, "step", 128): 50.0}, bad=("step", 128)), DEEP).run()
    (place,) = found.places
    assert getattr(place.parameters, "step", 0) != 128
    assert place.refused >= 1
    assert place.tried + place.refused == len(neighbours(place.first))


def test_a_start_that_is_refused_ends_it() -> None:
    with pytest.raises(Refused, match="made to be"):
        search(Made({}, bad=("warps", 8)), DEEP).run()


def test_what_a_rule_chooses_by_form() -> None:
    kinds = {
        DEEP: Fragments,
        DEEP._replace(kernel="linear_many", rows=128): Tile,
        attention_site("attention_decode", 8, 16, 4, 128, "bfloat16"): Splits,
        attention_site("attention_prefill", 128, 16, 16, 128, "float32"): Queries,
    }
    for site, form in kinds.items():
        assert type(configuration(H200, site)) is form
