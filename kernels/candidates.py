"""What may be tried in place of a configuration: the same with one of its values changed, or two that go together; and in
place of all of a step that tables configure, the same with another carve-out; and in place of what a step's launches ask
multiprocessors for, the same with some of it drawn anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

import msgspec

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.tuning import FORMS, Fragments, Parameters, Queries, Splits, Tile
from ouro_build.kernels.attention_decode import split_shape
from ouro_build.kernels.attention_prefill import query_shape
from ouro_build.kernels.linear_few import fragment_shape
from ouro_build.kernels.linear_many import tile_shape
from ouro_build.kernels.sites import Site
from ouro_build.kernels.tuning import Residencies

# Registers are tried at all their values, not only at the next ones: where one more program fits, or a loop keeps its order,
# may be many values away, and what lies between is then no faster.
_VALUES: Mapping[type, Mapping[str, tuple[int, ...]]] = {
    Fragments: {
        "block_n": (16, 32, 64),
        "warps": (2, 4, 8),
        "step": (32, 64, 128, 256, 512),
        "ahead": (1, 2, 3, 4, 6, 8, 10, 16),
        "x_ahead": (1, 2, 4, 6, 8),
        "maxnreg": (80, 88, 96, 104, 128, 136, 144, 160, 168, 184, 255),
    },
    Tile: {
        "m": (16, 32, 64, 128, 256),
        "n": (32, 64, 128, 256),
        "k": (32, 64, 128),
        "warps": (4, 8),
        "stages": (2, 3, 4, 5),
    },
    Splits: {
        "tile_bytes": (4096, 8192, 16384, 32768),
        "warps": (2, 4, 8, 16),
        "programs": (1, 2, 3, 4, 6, 8),
        "longest": (16, 32, 64, 128, 256),
        "shortest": (1, 2, 4),
        "stages": (2, 3, 4),
        "maxnreg": (64, 72, 80, 88, 96, 128, 168, 255),
    },
    Queries: {"rows": (16, 32, 64, 128), "tile": (16, 32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
}
_CARVEOUTS = (-1, 50, 75, 100)
# Multiprocessors round a carve-out up to sizes that they have, which differ by architecture: these tell most of them apart.
_RESIDENT_CARVEOUTS = (-1, 0, 4, 10, 20, 30, 44, 56, 60, 68, 75, 82, 88, 100)
# Few at a time: what a block has more of, others beside it lack. 0 is there twice, for it is the image's own.
_RESIDENT_SHARED = (0, 0, 1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384, 24576, 32768)
_SHARE_ALIKE = 0.25  # of all changes, those that give every launch one carve-out
# (grows, shrinks): the product, what is on its way at a time, stays.
_TOGETHER: Mapping[type, tuple[tuple[str, str], ...]] = {
    Fragments: (("step", "ahead"), ("ahead", "step"), ("block_n", "ahead"), ("ahead", "block_n"), ("warps", "step")),
    Tile: (("m", "n"), ("n", "m"), ("k", "stages"), ("stages", "k")),
    Splits: (("tile_bytes", "programs"), ("programs", "tile_bytes"), ("warps", "programs")),
    Queries: (("rows", "tile"), ("tile", "rows")),
}


def configuration(part: Part, site: Site) -> Parameters:
    """What the launch rule chooses at `site` now: by the part's tables, or by reasoning."""
    form = FORMS[site.kernel]
    if form is Fragments:
        return fragment_shape(part, site)
    if form is Splits:
        return split_shape(part, site)
    return query_shape(part, site) if form is Queries else tile_shape(part, site)


def neighbours(current: Parameters) -> tuple[Parameters, ...]:
    """Configurations one change away, without repetition, in a fixed order. Whether a part can run them is seen later."""
    changes = [*_single(current), *_paired(current)]
    made = [msgspec.structs.replace(current, **change) for change in changes if _consistent(current, change)]
    return tuple(dict.fromkeys(p for p in made if p != current))


def carved(current: Mapping[Site, Parameters]) -> tuple[dict[Site, Parameters], ...]:
    """`current` with each carve-out at all sites whose form has one; none if no form has.

    A multiprocessor often drains between kernels of other carve-outs, so at one site alone a change shows little of its worth.
    """
    sites = {site: p for site, p in current.items() if isinstance(p, Fragments | Splits)}
    made = [{**current, **{s: msgspec.structs.replace(p, carveout=c) for s, p in sites.items()}} for c in _CARVEOUTS]
    return tuple(choice for choice in made if choice != current)


def residency_origins(now: Residencies) -> dict[str, Residencies]:
    """What a search starts from, by its name for people: `now`, and every launch alike with nothing added to its blocks."""
    return {"as it is": now, "the driver's choice": _alike(now, -1), "100 % for all": _alike(now, 100)}


def changed_residency(current: Residencies, most_shared: int, random: Random) -> Residencies:
    """`current` with one, two, three or all of its launches drawn anew, with at most `most_shared` bytes a block.

    Sometimes every launch also gets one carve-out: a multiprocessor often drains between launches of different ones, so that
    single changes from one for all to another lead through what is slower.
    """
    count = random.choice((1, 1, 2, 3, len(current)))
    shared = [size for size in _RESIDENT_SHARED if size <= most_shared]
    changed = dict(current)
    for key in random.sample(list(current), min(count, len(current))):
        drawn = {"carveout": random.choice(_RESIDENT_CARVEOUTS), "shared": random.choice(shared)}
        changed[key] = msgspec.structs.replace(current[key], **drawn)
    if random.random() >= _SHARE_ALIKE:
        return changed
    carveout = random.choice(_RESIDENT_CARVEOUTS)
    return {key: msgspec.structs.replace(asked, carveout=carveout) for key, asked in changed.items()}


def _alike(now: Residencies, carveout: int) -> Residencies:
    return {key: msgspec.structs.replace(asked, carveout=carveout, shared=0) for key, asked in now.items()}


def _single(current: Parameters) -> Iterator[dict[str, int]]:
    for name, values in _VALUES[type(current)].items():
        for value in values:
            yield {name: value}


def _paired(current: Parameters) -> Iterator[dict[str, int]]:
    allowed = _VALUES[type(current)]
    for grows, shrinks in _TOGETHER[type(current)]:
        change = {grows: getattr(current, grows) * 2, shrinks: getattr(current, shrinks) // 2}
        if all(value in allowed[name] for name, value in change.items()):
            yield change


def _consistent(current: Parameters, change: Mapping[str, int]) -> bool:
    if not isinstance(current, Splits):
        return True
    return change.get("shortest", current.shortest) <= change.get("longest", current.longest)
