"""The search: a carve-out for all kernels that tables configure, then kernel by kernel, one change at a time, each kept only
if the whole step is faster with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.tuning import Entry, Fragments, Measured, Parameters, Splits
from ouro_build.builder.inspect import percent_carved
from ouro_build.builder.tune_bench import Refused
from ouro_build.builder.tune_plans import Asked, Choice
from ouro_build.kernels.candidates import carved, configuration, neighbours
from ouro_build.kernels.sites import Site

ROUNDS = 3
"""How often every site is come back to, at most."""
GAIN = 0.997
"""A step must take less than this share of the time it took: less is noise."""


class Bench(Protocol):
    """Where steps are measured."""

    def compile(self, choices: list[Choice], residency: Asked = ()) -> None:
        """Compile what the steps need, each with `residency`."""

    def microseconds(self, choice: Choice, hopeless: float = math.inf, residency: Asked = ()) -> float:
        """The time of a step, roughly where it is more than `hopeless`. Raises Refused for one that must not be used."""


@dataclass
class Place:
    """What was found at a site: `launches` of it in a step, what it `gained` in microseconds, how many configurations ran and
    how many were refused."""

    site: Site
    launches: int
    first: Parameters
    parameters: Parameters
    gained: float = 0.0
    tried: int = 0
    refused: int = 0


@dataclass
class Found:
    """The outcome of a search: microseconds of the step before it and after it, every site, and what the step gained by the
    carve-out that the sites changed together (`carved_us`) and by what launches ask for (`resident_us`), which no site gained
    alone. `residency` is what they ask for then; empty where no table asks."""

    before_us: float
    us: float
    places: list[Place] = field(default_factory=list)
    carved_us: float = 0.0
    residency: Asked = ()
    resident_us: float = 0.0

    def choice(self) -> Choice:
        """What was chosen at the sites."""
        return {place.site: place.parameters for place in self.places}

    def entries(self) -> tuple[Entry, ...]:
        """As a table holds them; a site where nothing was faster keeps the configuration that it had."""
        return tuple(
            Entry(
                kernel=p.site.kernel,
                bits=p.site.bits,
                rows=p.site.rows,
                sizes=p.site.sizes,
                parameters=p.parameters,
                measured=Measured(before_us=round(self.us + p.gained, 2), us=round(self.us, 2), launches=p.launches),
            )
            for p in self.places
        )


class Search:
    """Descends from what the tables of `part` choose at `sites` (with the launches of each)."""

    def __init__(self, bench: Bench, part: Part, sites: Iterable[tuple[Site, int]], say: Callable[[str], None]) -> None:
        self._bench, self._say = bench, say
        self._places = {}
        for site, launches in sites:
            now = configuration(part, site)
            self._places[site] = Place(site, launches, now, now)
        self._seen: set[tuple[Site, Parameters]] = set()

    def run(self, *, carves: bool = True) -> Found:
        """Choose a carve-out, if `carves` (the sites must then be all that tables configure), and go round the sites until a
        round changes nothing. Raises Refused if the step that was there first is not right."""
        self._bench.compile([self._choice()])
        before = best = self._bench.microseconds(self._choice())
        self._say(f"{before:.1f} µs a step before")
        carved_us, best = self._carve(best) if carves else (0.0, best)
        for _ in range(ROUNDS):
            faster = best
            for place in self._places.values():
                faster = self._improve(place, faster)
            if faster == best:
                break
            best = faster
        return Found(before, best, list(self._places.values()), carved_us)

    def _choice(self, site: Site | None = None, parameters: Parameters | None = None) -> Choice:
        """What is chosen so far, with `parameters` at `site`."""
        choice = {s: place.parameters for s, place in self._places.items()}
        if site is not None and parameters is not None:
            choice[site] = parameters
        return choice

    def _carve(self, best: float) -> tuple[float, float]:
        """Try the carve-outs, each at all sites together; what the step gained, and its time afterwards."""
        gained, choices = 0.0, carved(self._choice())
        if not choices:
            return gained, best
        self._bench.compile(list(choices))
        times = [self._time_carved(choice, hopeless=best) for choice in choices]
        found = [(us, at) for at, us in enumerate(times) if us is not None]
        if found and min(found)[0] < best * GAIN:
            fastest = choices[min(found)[1]]
            if confirmed := self._confirm(partial(self._time_carved, fastest)):
                gained, best = confirmed
                for site, place in self._places.items():
                    place.parameters = fastest[site]
        self._say(f"carve-outs: {len(found)} tried, {len(choices) - len(found)} refused, {best:.1f} µs a step")
        return gained, best

    def _improve(self, place: Place, best: float) -> float:
        """Try what is near the configuration of `place`; the step's time afterwards."""
        site = place.site
        near = [p for p in neighbours(place.parameters) if (site, p) not in self._seen]
        self._seen.update((site, p) for p in (place.parameters, *near))
        self._bench.compile([self._choice(site, p) for p in near])
        times = {p: us for p in near if (us := self._time(place, p, hopeless=best)) is not None}
        place.tried += len(times)
        if times:
            fastest = min(times, key=lambda p: times[p])
            if times[fastest] < best * GAIN and (confirmed := self._confirm(partial(self._time, place, fastest))):
                gained, best = confirmed
                place.gained += gained
                place.parameters = fastest
        self._say(f"{site.name}: {place.tried} tried, {place.refused} refused, {best:.1f} µs a step")
        return best

    def _confirm(self, time: Callable[[], float | None]) -> tuple[float, float] | None:
        """Measure what was fastest once more beside what it would replace: the fastest of many is often only the luckiest.

        Microseconds that the step gains, and its time; None where it gains nothing.
        """
        now = self._bench.microseconds(self._choice())
        then = time()
        return None if then is None or then >= now * GAIN else (now - then, then)

    def _time_carved(self, choice: Choice, hopeless: float = math.inf) -> float | None:
        try:
            return self._bench.microseconds(choice, hopeless)
        except Refused as refusal:
            self._say(f"carve-outs: refused {_carveout(choice)}: {refusal}")
            return None

    def _time(self, place: Place, parameters: Parameters, hopeless: float = math.inf) -> float | None:
        try:
            return self._bench.microseconds(self._choice(place.site, parameters), hopeless)
        except Refused as refusal:
            place.refused += 1
            self._say(f"{place.site.name}: refused {_shown(place.parameters, parameters)}: {refusal}")
            return None


def _carveout(choice: Choice) -> str:
    """The one that a choice of `carved` gives its sites."""
    return next(percent_carved(p.carveout) for p in choice.values() if isinstance(p, Fragments | Splits))


def _shown(current: Parameters, other: Parameters) -> str:
    """What `other` changes."""
    names = [n for n in current.__struct_fields__ if getattr(current, n) != getattr(other, n)]
    return ", ".join(f"{n}={getattr(other, n)}" for n in names)
