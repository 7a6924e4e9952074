"""What a build records and places for sparse modes."""

from collections import Counter
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from ouro_build.artifacts.columns import decode_plan
from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Edge, Plan, Pool, ProgramKey
from ouro_build.artifacts.presets import PRESETS
from ouro_build.artifacts.references import slot_bytes
from ouro_build.builder.plan_target import Target, plan_target

MODEL = PRESETS["tiny"].model
SLOTS, CAPACITY = 3, 40
GIB = 1 << 30


@cache
def planned(
    retention: float = 0.25,
    modes: tuple[str, ...] = SPARSE_MODES,
    layers: int = MODEL.layers,
    buckets: tuple[int, ...] = (1, 2),
) -> Target:
    sparse = {"sparse_modes": modes, "key_retention": retention}
    if retention < 1 and len(modes) > 1:
        sparse |= {"key_capacity": CAPACITY, "reference_slots": SLOTS}
    geometry = Geometry(
        buckets=buckets, prefill_buckets=(16,), max_context=128, max_requests=buckets[-1], block_size=16, **sparse  # type: ignore[arg-type]
    )  # fmt: skip
    return plan_target(msgspec.structs.replace(MODEL, layers=layers), geometry, find_part("h200"), 4 * GIB)


def kernels(target: Target, mode: str, variant: str = "", bucket: int = 2) -> Counter[str]:
    """How often a program of `recurrent` launches each kernel."""
    return Counter(launch.specialization.kernel for launch in plan(target, mode, variant, bucket).launches)


def plan(target: Target, mode: str, variant: str = "", bucket: int = 2) -> Plan:
    return plan_of(target, ProgramKey("recurrent", bucket, mode, variant))


def plan_of(target: Target, key: ProgramKey) -> Plan:
    entry = next(entry for entry in target.index.plans if entry.key == key)
    return decode_plan(target.index, target.columns, entry)


def test_every_bucket_has_every_mode_and_mixed_comes_in_two_forms() -> None:
    forms = {("dense", ""), ("capture", ""), ("consume", ""), ("mixed", ""), ("mixed", "no_capture")}
    found = {(k.bucket, k.mode, k.variant) for k in (e.key for e in planned().index.plans) if k.program == "recurrent"}
    assert found == {(bucket, *form) for bucket in (1, 2) for form in forms}
    others = {e.key.mode for e in planned().index.plans if e.key.program != "recurrent"}
    assert others == {"dense"}


def test_what_each_mode_launches() -> None:
    layers = MODEL.layers
    dense, capture, consume = (kernels(planned(), mode) for mode in ("dense", "capture", "consume"))
    assert dense["attention_decode"] == dense["attention_merge"] == layers
    retained = Counter(attention_retained=layers, retained_merge=layers)
    full = Counter(attention_capture=layers, attention_merge=layers, attention_select=layers)
    rest = dense - Counter(attention_decode=layers, attention_merge=layers, split_contexts=1)
    assert dense["split_contexts"] == 1
    full += Counter(split_contexts=1)
    assert capture == rest + full + retained
    assert consume == rest + retained, "a consuming row does no dense work"
    assert kernels(planned(), "mixed") == rest + full + retained + Counter(route_rows=1)
    assert kernels(planned(), "mixed", "no_capture") == dense + retained + Counter(route_rows=1)


@pytest.mark.parametrize("form", [("dense", ""), ("capture", ""), ("mixed", ""), ("mixed", "no_capture")])
def test_contexts_are_cut_in_view_of_all_rows_whose_keys_are_written(form: tuple[str, str]) -> None:
    """Rows that consume write keys too, and rows of their request that do not consume read these."""
    launches = plan(planned(), *form).launches
    writers = {x.named()["rows"] for x in launches if x.specialization.kernel in ("linear_rope", "rope_kv_write")}
    (cut,) = (x.named() for x in launches if x.specialization.kernel == "split_contexts")
    assert writers == {cut["batch"]}
    assert (cut["rows"] != cut["batch"]) == (form[0] == "mixed")


def test_who_captures_has_its_output_read_and_who_consumes_written() -> None:
    """By the last launch of a layer's attention; in mixed programs, where both may be, it is one buffer."""
    forms = (("capture", ""), ("consume", ""), ("mixed", ""), ("mixed", "no_capture"))
    names = []
    for form in forms:
        launches = plan(planned(), *form, 2).launches
        selected = [dict(x.buffers()) for x in launches if x.specialization.kernel == "attention_select"]
        assert not any({"out", "attended", "reference_output"} & set(x) for x in selected), "selecting waits for no output"
        found = [dict(x.buffers()) for x in launches if x.specialization.kernel == "retained_merge"]
        names.append({tuple(name for name in ("attended", "out") if name in x) for x in found})
        assert all(x["attended"] == x["out"] for x in found if {"attended", "out"} <= set(x))
    assert names == [{("attended",)}, {("out",)}, {("attended", "out")}, {("out",)}]


def test_dense_programs_do_not_depend_on_the_other_modes() -> None:
    """Those of prompts neither: a first token takes as long."""
    alone = planned(modes=("dense",))
    keys = [entry.key for entry in alone.index.plans]
    assert {"prelude", "prefill", "recurrent", "coda", "sample", "advance"} < {key.program for key in keys}
    for key in keys:
        one, other = (plan_of(target, key).launches for target in (planned(), alone))
        assert [(x.specialization, x.grid, x.after) for x in one] == [(x.specialization, x.grid, x.after) for x in other], key


def test_with_all_keys_retained_every_mode_is_the_dense_program() -> None:
    target = planned(1.0)
    dense = plan(target, "dense")
    for mode, variant in (("capture", ""), ("consume", ""), ("mixed", ""), ("mixed", "no_capture")):
        found = plan(target, mode, variant)
        # Residency is of mode dense alone; the images are the same.
        images = [[(x.specialization.compiled(), x.grid) for x in plan.launches] for plan in (found, dense)]
        assert images[0] == images[1]
    assert target.pools[Pool.REFERENCES] == 0


@pytest.mark.parametrize("modes", [("dense",), ("dense", "mixed"), SPARSE_MODES])
def test_the_reference_pool_is_there_where_rows_remember(modes: tuple[str, ...]) -> None:
    target = planned(modes=modes)
    pool = [b for b in target.index.buffers if b.pool is Pool.REFERENCES]
    if modes == ("dense",):
        assert not pool
        assert target.pools[Pool.REFERENCES] == 0
        return
    assert sum(b.bytes for b in pool) == SLOTS * slot_bytes(MODEL, CAPACITY) + 4 * 129
    assert all(b.offset + b.bytes <= target.pools[Pool.REFERENCES] for b in pool)
    # A slot's parts lie in one piece each: retiring is one write a buffer.
    assert all(b.sizes[0] == SLOTS for b in pool if b.name != "retained_counts")


def ancestors(plan: Plan) -> list[set[int]]:
    """The launches that come before each."""
    found: list[set[int]] = []
    for launch in plan.launches:
        found.append({i for at, _ in launch.after for i in (at, *found[at])})
    return found


def places(plan: Plan, kernel: str) -> list[int]:
    """Where a plan launches a kernel, layer by layer."""
    return [at for at, launch in enumerate(plan.launches) if launch.specialization.kernel == kernel]


def test_what_a_capture_remembers_is_made_beside_the_layers_that_follow() -> None:
    layers = 5
    captured = plan(planned(layers=layers), "capture")
    before = ancestors(captured)
    names = ("attention_capture", "attention_merge", "attention_select", "attention_retained", "retained_merge")
    capture, merge, select, retained, remember = (places(captured, name) for name in names)
    for layer in range(layers):
        made = {select[layer], retained[layer], remember[layer]}
        assert {capture[layer], merge[layer], select[layer], retained[layer]} < before[remember[layer]]
        assert merge[layer] not in before[select[layer]], "selecting does not wait for the layer's output"
        if layer + 1 < layers:
            assert not made & before[capture[layer + 1]]
            assert made < before[select[layer + 1]]
        for later in range(layer + 2, layers):
            assert made < before[capture[later]], "at most two layers' scores are kept"
    assert before[-1] == set(range(len(captured.launches) - 1)), "a loop ends when all of it has"


@pytest.mark.parametrize(("mode", "variant"), [("dense", ""), ("consume", ""), ("mixed", ""), ("mixed", "no_capture")])
def test_other_modes_are_chains_but_for_the_cutting_of_contexts(mode: str, variant: str) -> None:
    """It runs beside what the first layer's attention follows, and has ended when that starts."""
    found = plan(planned(), mode, variant)
    names = [launch.specialization.kernel for launch in found.launches]
    cut = places(found, "split_contexts")
    assert len(cut) == (mode != "consume")
    chain = [at for at in range(len(names)) if at not in cut]
    expected = {at: [before] for before, at in pairwise(chain)} | {0: []} | {at: [at - 1] for at in cut}
    (prepared,) = cut or places(found, "locate")
    first = next(at for at, name in enumerate(names) if name.startswith("attention_"))
    expected[first].append(prepared)
    assert [[at for at, _ in launch.after] for launch in found.launches] == [expected[at] for at in range(len(names))]
    # What is read early was selected, or found out about the rows, by launches that have ended.
    full = {(first, prepared)} | {(at + 1, at) for at in places(found, "attention_select")}
    edges = [(at, before, edge) for at, launch in enumerate(found.launches) for before, edge in launch.after]
    assert {(at, before) for at, before, edge in edges if edge is Edge.FULL} == full


def test_nothing_waits_inside_for_a_selection() -> None:
    """What has started holds its place on the device, and a selection takes long."""
    captured = plan(planned(), "capture")
    for select, retained in zip(places(captured, "attention_select"), places(captured, "attention_retained"), strict=True):
        assert captured.launches[retained].after == ((select, Edge.FULL),)
