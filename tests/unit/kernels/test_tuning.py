"""Which configuration a launch rule gets: exact, near, of the kind, of the nearest architecture, or reasoned."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Launch, LoadTimeValue
from ouro_build.artifacts.tuning import (
    FORMS,
    KINDS,
    Entry,
    Fragments,
    Queries,
    Residency,
    Splits,
    Tile,
    TuningTable,
    decode_table,
)
from ouro_build.kernels.attention_decode import reasoned_splits, split_rule, split_shape
from ouro_build.kernels.attention_prefill import attention_prefill
from ouro_build.kernels.linear import linear
from ouro_build.kernels.linear_few import fragment_shape, reasoned_fragments
from ouro_build.kernels.sites import Site, attention_site, site_of
from ouro_build.kernels.tuning import NO_RESIDENCY, SHIPPED, Tuning, shipped, tuned, tuning_of
from tests.kernel_cases.tuned import launch_of
from tests.kernel_harness import buffer, matrix_buffer

H200 = find_part("h200")
SITE = Site("linear_few", 16, 4, (2048, 5632), "deep")
DECODE = attention_site("attention_decode", 4, 16, 16, 128, "bfloat16")
SPLITS = Splits(tile_bytes=8192, warps=4, programs=3, longest=32, shortest=2, stages=2, maxnreg=0)


def fragments(ahead: int) -> Fragments:
    return Fragments(block_n=16, warps=8, step=64, ahead=ahead, x_ahead=1, maxnreg=168)


def entry(ahead: int, rows: int, sizes: tuple[int, ...] = (), kind: str = "") -> Entry:
    return Entry(kernel="linear_few", bits=16, rows=rows, sizes=sizes, kind=kind, parameters=fragments(ahead))


def table(*entries: Entry, arch: str = "sm_90") -> TuningTable:
    return TuningTable(name="mine", arch=arch, source="a test", entries=entries)


EXACT, FEWER, MORE = entry(1, 4, SITE.sizes), entry(2, 2, SITE.sizes), entry(3, 8, SITE.sizes)
KIND, ANY, OTHER = entry(4, 8, kind="deep"), entry(5, 0, kind="deep"), entry(6, 16, SITE.sizes)
KIND_EXACT, KIND_FEWER = entry(7, 4, kind="deep"), entry(8, 1, kind="deep")
ORDER = (EXACT, MORE, FEWER, KIND_EXACT, KIND, KIND_FEWER, ANY)
"""The best first."""


@pytest.mark.parametrize("at", range(len(ORDER)))
def test_the_nearest_entry_of_a_table(at: int) -> None:
    left = table(OTHER, *ORDER[at:][::-1])
    assert Tuning((left,)).find(SITE) == ORDER[at]


def test_rows_of_another_tile_and_other_shapes_find_nothing() -> None:
    mine = Tuning((table(*ORDER, OTHER),))
    assert mine.find(SITE._replace(rows=9)) == OTHER
    assert mine.find(SITE._replace(rows=17)) == ANY
    for other in (
        SITE._replace(kernel="linear_rope"),
        SITE._replace(bits=32),
        SITE._replace(sizes=(1, 2), kind="tall"),
    ):
        assert mine.find(other) is None


@given(st.permutations([*ORDER, OTHER]), st.integers(1, 64))
def test_the_order_of_entries_changes_nothing(entries: list[Entry], rows: int) -> None:
    site = SITE._replace(rows=rows)
    assert Tuning((table(*entries),)).find(site) == Tuning((table(*ORDER, OTHER),)).find(site)


def test_a_table_that_is_asked_first_wins_and_leaves_the_rest_to_the_next() -> None:
    mine = tuned(H200, (table(ANY),))
    assert fragment_shape(mine, SITE) == ANY.parameters
    narrow = SITE._replace(sizes=(2048, 2048), kind="narrow")
    assert fragment_shape(mine, narrow) == fragment_shape(H200, narrow)
    assert (mine.name, mine.arch, mine.capability) == (H200.name, H200.arch, H200.capability)


def test_a_table_for_other_rows_yields_to_one_for_the_very_rows() -> None:
    mine = table(FEWER)
    assert Tuning((mine, table(MORE, KIND))).find(SITE) == FEWER
    assert Tuning((mine, table(KIND_EXACT))).find(SITE) == KIND_EXACT
    assert Tuning((table(ANY), table(KIND_EXACT))).find(SITE) == ANY, "any rows are these too"
    lone = split_shape(H200, attention_site("attention_decode", 1, 16, 16, 128, "bfloat16"))
    given = Entry(kernel="attention_decode", bits=16, rows=1, sizes=(16, 16, 128), parameters=lone)
    assert (
        split_shape(tuned(H200, (table(given),)), DECODE._replace(rows=8)) == split_shape(H200, DECODE._replace(rows=8)) != lone
    )


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [("sm_80", "sm_90"), ("sm_89", "sm_90"), ("sm_90", "sm_90"), ("sm_100", "sm_100"), ("sm_103", "sm_100"),
     ("sm_120", "sm_120"), ("sm_121", "sm_120")],
)  # fmt: skip
def test_the_nearest_shipped_table(arch: str, nearest: str) -> None:
    part = find_part(arch)
    assert shipped(part).arch == nearest
    (record,) = tuning_of(part).records(part)
    assert (record.name, record.match) == (nearest, "exact" if arch == nearest else "nearest")
    assert record.digest == shipped(part).digest


def test_no_table_and_the_rule_reasons() -> None:
    bare = tuned(H200, ())
    none = msgspec.structs.replace(bare, tuning=Tuning(()))
    assert fragment_shape(none, SITE) == reasoned_fragments(4)
    many = DECODE._replace(rows=64)
    assert tuning_of(H200).find(many) is None
    assert split_shape(none, many) == split_shape(H200, many) == reasoned_splits(H200, many)
    few = DECODE._replace(rows=32)
    assert split_shape(none, few) == reasoned_splits(H200, few) != split_shape(H200, few)


def test_decode_attention_takes_entries_of_its_own_architecture_alone() -> None:
    near = find_part("sm_89")
    assert tuning_of(near).find(DECODE) == tuning_of(H200).find(DECODE) is not None
    assert split_shape(near, DECODE) == reasoned_splits(near, DECODE) != split_shape(H200, DECODE)
    assert fragment_shape(near, SITE) == fragment_shape(H200, SITE) != reasoned_fragments(4)


def test_a_carveout_reaches_every_kernel_for_few_rows() -> None:
    for e in shipped(H200).entries:
        given = msgspec.structs.replace(e, parameters=msgspec.structs.replace(e.parameters, carveout=75))
        carved, plain = (launch_of(p, e).specialization for p in (tuned(H200, (table(given),)), H200))
        assert (carved.options.carveout, plain.options.carveout) == (75, getattr(e.parameters, "carveout", None))
        assert carved.compiled() == plain.compiled()


@pytest.mark.parametrize("arch", sorted(path.stem for path in SHIPPED.glob("*.json")))
@pytest.mark.parametrize("rows", [*range(1, 18), 32, 33])
def test_all_kernels_of_a_step_have_one_carveout(arch: str, rows: int) -> None:
    """Of entries: else multiprocessors would often drain between them."""
    tuning = tuning_of(find_part(arch))
    kinds = [(kernel, kind) for kernel, known in KINDS.items() if FORMS[kernel] in (Fragments, Splits) for kind in known]
    found = [tuning.find(Site(kernel, 16, rows, (1, 1), kind)) for kernel, kind in kinds]
    assert len({-1 if entry is None else getattr(entry.parameters, "carveout", None) for entry in found}) == 1


def asked(rows: int, shared: int) -> Residency:
    return Residency(kernel="residual_norm", bits=16, rows=rows, shared=shared)


def test_residency_is_of_the_first_table_of_the_architecture_that_has_it_for_the_very_rows() -> None:
    def with_residency(*listed: Residency, arch: str = "sm_90") -> TuningTable:
        return msgspec.structs.replace(table(arch=arch), residency=listed)

    other, first, second = with_residency(asked(1, 1), arch="sm_80"), with_residency(asked(2, 2)), with_residency(asked(1, 3))
    found = Tuning((other, first, second))
    assert found.residency("sm_90", 16, 1, ()) == {("residual_norm", ""): asked(1, 3)}
    assert found.residency("sm_90", 16, 2, ()) == {("residual_norm", ""): asked(2, 2)}
    assert found.residency("sm_80", 16, 1, ()) == {("residual_norm", ""): asked(1, 1)}
    for arch, bits, rows in (("sm_90", 16, 3), ("sm_90", 32, 1), ("sm_89", 16, 1)):
        assert found.residency(arch, bits, rows, ()) == NO_RESIDENCY


def test_where_an_entry_of_an_earlier_table_is_used_there_is_no_residency_of_a_later_one() -> None:
    later = msgspec.structs.replace(table(), residency=(asked(2, 2), asked(4, 4)))
    other = Tuning((table(entry(1, 4, kind="narrow"), entry(1, 2, kind="deep")), later))
    found = {("residual_norm", ""): asked(4, 4)}
    assert other.residency("sm_90", 16, 4, [SITE]) == found, "no entry for a site"
    assert other.residency("sm_90", 16, 4, [SITE._replace(kind="narrow")]) == NO_RESIDENCY
    assert other.residency("sm_90", 16, 2, [SITE._replace(rows=2)]) == NO_RESIDENCY


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_tables_hold_every_kind_of_the_kernels_for_few_rows(path: object) -> None:
    raw = decode_table(path.read_bytes(), "t")  # type: ignore[attr-defined]
    assert raw.arch == raw.name
    assert ("measured" in raw.source) != raw.source.startswith("Chosen")
    places = {(e.kernel, e.kind, e.rows) for e in raw.entries}
    for kernel in ("linear_few", "linear_rope", "linear_silu"):
        assert {(kernel, kind, rows) for kind in KINDS[kernel] for rows in (8, 16, 32)} <= places


def test_a_site_is_told_from_the_launch_as_the_rule_told_it() -> None:
    for e in shipped(H200).entries:
        launch = launch_of(H200, e)
        site = site_of(launch)
        assert site is not None
        assert tuning_of(H200).find(site) == e
    bare = Launch(specialization=launch_of(H200, shipped(H200).entries[0]).specialization, grid=(1, 1, 1), arguments=())
    other = msgspec.structs.replace(
        bare, specialization=msgspec.structs.replace(bare.specialization, kernel="rms_norm", types=())
    )
    assert site_of(other) is None


def test_every_form_reaches_its_launch() -> None:
    many = Tile(m=32, n=64, k=32, warps=2, stages=2)
    queries = Queries(rows=32, tile=16, warps=2, stages=2)
    part = tuned(
        H200,
        (
            table(
                Entry(kernel="linear_many", bits=16, rows=64, sizes=(256, 128), parameters=many),
                Entry(kernel="attention_prefill", bits=16, rows=64, sizes=(4, 4, 64), parameters=queries),
                Entry(kernel="attention_decode", bits=16, rows=0, kind="single", parameters=SPLITS),
                entry(7, 0, kind="narrow"),
            ),
        ),
    )
    rows = buffer("rows", "int32", 64, 8)
    tiled = linear(part, rows=rows, x=buffer("x", "bfloat16", 64, 128), weight=matrix_buffer("w", "bfloat16", 256, 128),
                   out=buffer("out", "bfloat16", 64, 256))  # fmt: skip
    assert tiled.grid == (2 * 4, 1, 1)
    assert dict(tiled.specialization.constants) | {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32} == dict(
        tiled.specialization.constants
    )
    assert (tiled.specialization.options.num_warps, tiled.specialization.options.num_stages) == (2, 2)
    prefill = attention_prefill(
        part, rows=rows, q=buffer("q", "bfloat16", 64, 4, 64), block_tables=buffer("tables", "int32", 1, 8),
        kv=buffer("kv", "bfloat16", 8, LoadTimeValue.KV_BLOCKS, 2, 4, 16, 64), out=buffer("out", "bfloat16", 64, 256),
        layer=0, layers=2,
    )  # fmt: skip
    assert prefill.grid == (2, 4, 1)
    assert (dict(prefill.specialization.constants)["TILE"], prefill.specialization.options.num_warps) == (16, 2)
    rule = split_rule(part, 1, 16, 16, 128, "bfloat16")
    assert (rule.tile, rule.longest, rule.shortest) == (32, 32, 2)
    few = linear(part, rows=buffer("rows", "int32", 1, 8), x=buffer("x", "bfloat16", 1, 4096),
                 weight=matrix_buffer("w", "bfloat16", 256, 4096), out=buffer("out", "bfloat16", 1, 256))  # fmt: skip
    assert dict(few.specialization.constants)["AHEAD"] == 7
