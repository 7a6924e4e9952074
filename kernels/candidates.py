"""What may be tried in place of a configuration: the same with one of its values changed, or two that go together; and in
place of all of a step that tables configure, the same with another carve-out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.tuning import FORMS, Fragments, Parameters, Queries, Splits, Tile
from ouro_build.kernels.attention_decode import split_shape
from ouro_build.kernels.attention_prefill import query_shape
from ouro_build.kernels.linear_few import fragment_shape
from ouro_build.kernels.linear_many import tile_shape
from ouro_build.kernels.sites import Site

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

    A multiprocessor drains between kernels of other carve-outs, so at one site alone a change shows nothing of its worth.
    """
    sites = {site: p for site, p in current.items() if isinstance(p, Fragments | Splits)}
    made = [{**current, **{s: msgspec.structs.replace(p, carveout=c) for s, p in sites.items()}} for c in _CARVEOUTS]
    return tuple(choice for choice in made if choice != current)


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
