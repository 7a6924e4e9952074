"""The last search of a decode step: what its launches ask multiprocessors for, and so which lie beside each other there.

What one launch asks for shows only with what the others do, and the step's time has many valleys: changes are drawn at random,
from several origins, and each is kept only if the whole step is faster with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from ouro_build.builder.inspect import percent_carved
from ouro_build.builder.tune_bench import Refused
from ouro_build.builder.tune_plans import Choice
from ouro_build.builder.tune_search import GAIN, Bench, Found
from ouro_build.kernels.candidates import changed_residency, residency_origins
from ouro_build.kernels.tuning import Residencies

TRIALS = 300
"""Changes tried from each origin."""
_CLOSER = 0.999
"""A change must leave less than this share of the time: many small ones add up, and all together are held to GAIN."""
_AGAIN = 30
"""Changes after which what they are held against is measured again."""


class ResidencySearch:
    """Descends in steps with `choice`, whose blocks may have at most `most_shared` bytes of shared memory."""

    def __init__(self, bench: Bench, choice: Choice, most_shared: int, say: Callable[[str], None]) -> None:
        self._bench, self._choice, self._most_shared, self._say = bench, choice, most_shared, say
        self._random = Random(0)

    def run(self, found: Found, now: Residencies) -> Found:
        """`found` with what is faster than `now`, which its launches have; `found` itself where nothing is.

        Raises Refused if the step is not right any more as it was.
        """
        reached = [self._descend(name, origin) for name, origin in residency_origins(now).items()]
        best = min(reached, key=self._time)  # minutes lie between what was measured on the way
        before, after = self._bench.microseconds(self._choice), self._time(best)
        if after >= before * GAIN:
            self._say(f"residency: stays as it was, {before:.1f} µs a step; with the best that was found {after:.1f}")
            return found
        self._say(f"residency: {before:.1f} µs a step before, {after:.1f} with {_shown(best)}")
        return replace(found, us=after, residency=tuple(best.values()), resident_us=before - after)

    def _descend(self, name: str, origin: Residencies) -> Residencies:
        """Where changes lead from `origin`."""
        at, best = origin, self._time(origin)
        tried = refused = 0
        for trial in range(1, TRIALS + 1):
            if trial % _AGAIN == 0:  # the device may have another pace by now
                best = self._time(at)
            other = changed_residency(at, self._most_shared, self._random)
            if other == at:
                continue
            us = self._time(other, best)
            tried, refused = tried + (us < math.inf), refused + (us == math.inf)
            if us < best * _CLOSER:
                at, best = self._closer(at, other)
        self._say(f"residency from {name}: {tried} tried, {refused} refused, {best:.1f} µs a step")
        return at

    def _closer(self, at: Residencies, other: Residencies) -> tuple[Residencies, float]:
        """The faster of both, measured beside each other, and its time: the first may have been luck, or the device's pace
        another when `at` was measured."""
        now, then = self._time(at), self._time(other)
        if then >= now * _CLOSER:
            return at, now
        self._say(f"residency: {then:.1f} µs a step instead of {now:.1f}")
        return other, then

    def _time(self, residency: Residencies, hopeless: float = math.inf) -> float:
        """Microseconds of the step, without end if it must not be used."""
        asked = tuple(residency.values())
        try:
            self._bench.compile([self._choice], asked)
            return self._bench.microseconds(self._choice, hopeless, asked)
        except Refused as refusal:
            self._say(f"residency: refused {_shown(residency)}: {refusal}")
            return math.inf


def _shown(residency: Residencies) -> str:
    """For people: carve-out, and bytes a block where they are more than the image's own."""
    shown = []
    for (kernel, kind), asked in residency.items():
        shared = f" and {asked.shared} bytes" if asked.shared else ""
        shown.append(f"{kernel}{kind and f' {kind}'} {percent_carved(asked.carveout)}{shared}")
    return ", ".join(shown)
