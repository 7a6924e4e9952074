"""The kernels of sparse attention against their references, in the programs that builds record of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts.parts import PARTS, Part
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.rows import Mode, ReferenceRecord
from ouro_build.builder import sparse
from ouro_build.kernels.attention_retained import retained_splits
from tests.kernel_cases import attention_select
from tests.kernel_cases.attention import LAYER
from tests.kernel_cases.sparse import CAPTURED, CONSUMED, LATER, SOURCE, Row, Rows, Scene, bits, check_batches, checked, only
from tests.kernel_harness import run_reference

SHAPES = ((2, 2, 16), (6, 2, 16), (4, 1, 64))
LIVE = [i for i, row in enumerate(CAPTURED) if row is not None]


def remembering(**options: object) -> Scene:
    """A scene in whose slots the rows of CAPTURED are remembered."""
    scene = Scene(**options)  # type: ignore[arg-type]
    scene.run(CAPTURED, "capture", run=run_reference)
    return scene


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_matches_its_reference(shape: tuple[int, int, int], dtype: str) -> None:
    scene = Scene(dtype, shape=shape)
    scene.run(CAPTURED, "capture", run=checked)
    scene.run(CONSUMED, "consume", run=checked)


@pytest.mark.parametrize("block_size", [8, 48, 128])
def test_blocks_of_eights(block_size: int) -> None:
    scene = Scene(shape=(2, 2, 16), block_size=block_size)
    scene.run(CAPTURED, "capture", run=checked)
    scene.run(CONSUMED, "consume", run=checked)


@pytest.mark.parametrize("shape", SHAPES)
def test_capture_gives_the_dense_output_bit_for_bit(shape: tuple[int, int, int]) -> None:
    scene = Scene("float16", shape=shape)
    assert bits(scene.run(CAPTURED, "capture")).equal(bits(scene.run(CAPTURED, "dense")))


@pytest.mark.parametrize("mode", ["capture", "mixed"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_slot_remembers_its_own_rows_output(dtype: str, mode: str) -> None:
    """In float32, bit for bit, at its layer; what no row names stays as it was."""
    scene = Scene(dtype, shape=(6, 2, 16))
    want = scene.remembered["reference_output"]
    out = scene.run(CAPTURED, mode)
    for i, row in enumerate(CAPTURED):
        if row is not None:
            want[row.slot, LAYER] = out[i].float()
    assert bits(scene.remembered["reference_output"]).equal(bits(want))


@pytest.mark.parametrize("shape", SHAPES)
def test_consuming_at_the_source_loop_gives_the_output_back(shape: tuple[int, int, int]) -> None:
    scene = Scene(shape=shape)
    out = scene.run(CAPTURED, "capture")[LIVE]
    torch.testing.assert_close(scene.run(CAPTURED, "consume")[LIVE], out, atol=1e-6, rtol=1e-6)


def test_retaining_all_keys_gives_dense_attention() -> None:
    """Through the kernels: a retention just below 1 retains every key of these contexts."""
    scene = Scene(retention=0.9999)
    scene.run(CAPTURED, "capture")
    assert scene.tensors["retained_counts"][140] == 140
    torch.testing.assert_close(
        scene.run(CONSUMED, "consume")[LIVE], scene.run(CONSUMED, "dense")[LIVE], atol=1e-5, rtol=1e-5
    )  # fmt: skip


def test_a_retention_of_one_is_the_dense_program_in_every_mode() -> None:
    scene = Scene(retention=1.0)
    dense = scene.plan("dense")[0].launches
    for mode, variant in (("capture", ""), ("consume", ""), ("mixed", ""), ("mixed", "no_capture")):
        found = scene.plan(mode, variant)[0].launches
        assert [(x.specialization, x.grid) for x in found] == [(x.specialization, x.grid) for x in dense]


def test_thirteen_keys_at_a_tenth_leave_two() -> None:
    scene = remembering(retention=0.1)
    row = CAPTURED[2]
    assert row is not None
    assert row.position == 12
    assert scene.tensors["reference_records"][row.slot, LAYER].tolist() == [row.generation, 2]


def test_one_key_is_retained_of_one_and_its_mass_is_all() -> None:
    scene = Scene()
    out = scene.run(CAPTURED, "capture")
    slot, place = 3, 1  # the row of position 0
    assert scene.tensors["reference_keys"][slot, LAYER, :, 0].tolist() == [0]
    assert scene.tensors["reference_mass"][slot, LAYER].tolist() == [1.0]
    torch.testing.assert_close(scene.tensors["reference_contribution"][slot, LAYER], out[place])
    consumed, dense = scene.run(CONSUMED, "consume"), scene.run(CONSUMED, "dense")
    torch.testing.assert_close(consumed[place], dense[place])


def test_equal_scores_are_retained_from_the_first() -> None:
    """Keys that are all the same, then two values alternating: ties everywhere, over several steps of the selection."""
    scene = Scene()
    kv = scene.tensors["kv"]
    kv[:, :, 0] = kv[:, :, 0].nan_to_num(0.0)
    kv[:, :, 0] = 1.0
    scene.run(CAPTURED, "capture", run=checked)
    keys, records = scene.tensors["reference_keys"][:, LAYER], scene.tensors["reference_records"][:, LAYER]
    for row in filter(None, CAPTURED):
        count = int(records[row.slot, ReferenceRecord.COUNT])
        assert keys[row.slot, :, :count].eq(torch.arange(count)).all()
    kv[:, :, 0, :, ::2] = 2.0
    scene.run(CAPTURED, "capture", run=checked)


def test_a_key_that_is_no_number_harms_no_other_row() -> None:
    scene, sound = Scene(shape=(2, 2, 16)), Scene(shape=(2, 2, 16))
    block = int(scene.tensors["block_tables"][2, 1])
    scene.tensors["kv"] = scene.tensors["kv"].clone()
    scene.tensors["kv"][:, block, 0] = float("nan")
    out, want = scene.run(CAPTURED, "capture"), sound.run(CAPTURED, "capture")
    kept = scene.tensors["reference_keys"][4, LAYER, :, :42]
    assert ((kept >= 0) & (kept < 140)).all()
    others = [i for i in LIVE if CAPTURED[i].request != 2]  # type: ignore[union-attr]
    assert bits(out[others]).equal(bits(want[others]))


def test_capacity_is_room_and_nothing_else() -> None:
    tight, roomy = remembering(), remembering(capacity=100)
    assert tight.capacity == 77
    a, b = tight.run(CONSUMED, "consume"), roomy.run(CONSUMED, "consume")
    assert bits(a).equal(bits(b))


def test_payloads_beyond_the_count_are_never_looked_at() -> None:
    """A capture overwrites the prefix it uses: what an earlier, longer one left behind changes nothing."""
    used, fresh = remembering(), Scene()
    shorter: Rows = tuple(row and replace(row, position=row.position // 2, generation=8) for row in CAPTURED)
    later: Rows = tuple(row and replace(row, loop=LATER) for row in shorter)
    for scene in (used, fresh):
        scene.run(shorter, "capture")
    assert bits(used.run(later, "consume")).equal(bits(fresh.run(later, "consume")))


@pytest.mark.parametrize("what", ["generation", "retired", "poisoned", "no slot", "beyond", "overflow"])
@pytest.mark.parametrize("mode", ["consume", "mixed"])
def test_a_slot_that_is_not_the_rows_gives_nan_and_touches_nothing(what: str, mode: str) -> None:
    scene = remembering()
    records = scene.tensors["reference_records"]
    rows = list(CONSUMED)
    row = rows[6]
    assert row is not None
    match what:
        case "generation":
            rows[6] = replace(row, generation=8)
        case "retired":
            records[row.slot] = 0
        case "poisoned":
            records[row.slot] = -1
        case "no slot":
            rows[6] = replace(row, slot=-1)
        case "beyond":
            rows[6] = replace(row, slot=scene.geometry.padding_slot)
        case _:
            records[row.slot, LAYER, ReferenceRecord.COUNT] = scene.capacity + 1
    before = scene.remembered
    out = scene.run(tuple(rows), mode, run=checked)
    assert out[6].isnan().all()
    others = [i for i in LIVE if i != 6]
    assert not out[others].isnan().any()
    assert all(bits(tensor).equal(bits(before[name])) for name, tensor in scene.remembered.items())


def test_a_row_without_a_slot_captures_nothing_and_is_dense() -> None:
    scene = remembering()
    rows = tuple(row and replace(row, slot=scene.geometry.padding_slot) for row in CAPTURED)
    before = scene.remembered
    for mode in ("capture", "mixed"):
        assert bits(scene.run(rows, mode)).equal(bits(scene.run(rows, "dense")))
    assert all(bits(tensor).equal(bits(before[name])) for name, tensor in scene.remembered.items())


# Every mode in every loop; slots of the source loop's rows differ from those that are read.
MIXED: Rows = (
    Row(1, 15, LATER, Mode.CAPTURE, 5), Row(0, 40, 0, Mode.CAPTURE, 3), None, Row(0, 63, SOURCE, Mode.CAPTURE, 2),
    Row(2, 139, SOURCE, Mode.CONSUME, 4), Row(2, 100, SOURCE, Mode.DENSE, 0), Row(1, 16, SOURCE, Mode.CAPTURE, 1),
    Row(0, 5, LATER, Mode.DENSE, -1),
)  # fmt: skip
CONSUMES, CAPTURES, DENSE = (0, 4), (3, 6), (1, 5, 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_is_the_uniform_modes_row_for_row(shape: tuple[int, int, int]) -> None:
    mixed, uniform = remembering(dtype="float16", shape=shape), remembering(dtype="float16", shape=shape)
    out = mixed.run(MIXED, "mixed", run=checked)
    assert bits(out[[2]]).eq(0xFF).all()
    for mode, chosen in (("dense", DENSE), ("capture", CAPTURES), ("consume", CONSUMES)):
        want = uniform.run(only(MIXED, chosen), mode)
        assert bits(out[list(chosen)]).equal(bits(want[list(chosen)])), mode
    for name, tensor in uniform.remembered.items():
        assert bits(tensor).equal(bits(mixed.remembered[name])), name


def test_mixed_without_capture_leaves_the_slots_alone() -> None:
    scene = remembering(shape=(4, 2, 16))
    rows = only(MIXED, CONSUMES + DENSE)
    before = scene.remembered
    out = scene.run(rows, "mixed", "no_capture", run=checked)
    want = scene.run(rows, "mixed")
    assert bits(out).equal(bits(want))
    assert all(bits(tensor).equal(bits(before[name])) for name, tensor in scene.remembered.items())
    # What would capture is dense there.
    out = scene.run(MIXED, "mixed", "no_capture")
    dense = scene.run(only(MIXED, CAPTURES), "dense")
    assert bits(out[list(CAPTURES)]).equal(bits(dense[list(CAPTURES)]))


def test_counts_come_from_the_table() -> None:
    scene = Scene(retention=0.3)
    scene.tensors["retained_counts"] = torch.ones_like(scene.tensors["retained_counts"])
    scene.run(CAPTURED, "capture")
    assert (scene.tensors["reference_records"][:, LAYER, ReferenceRecord.COUNT] == 1).all()
    assert retained_counts(256, 0.3)[140] == 42


@pytest.mark.parametrize("kind", attention_select.KINDS)
def test_selection_over_several_steps(kind: str) -> None:
    attention_select.case(kind).check()


@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_selection_from_more_scores_than_are_held(kind: str) -> None:
    attention_select.case(kind, width=33000, heads=1).check()


@pytest.mark.parametrize("retention", [1e-4, 0.5, 1.0])
def test_selection_of_one_of_half_and_of_all(retention: float) -> None:
    attention_select.case("ties", retention=retention, heads=1).check()


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 1 << 16), st.sampled_from(PARTS))
@settings(max_examples=100)
def test_retained_keys_are_split_into_programs_that_run_at_once(bucket: int, heads: int, most: int, part: Part) -> None:
    splits = retained_splits(part, bucket, heads, most, 32)
    assert 1 <= splits <= min(128, -(-most // 32))
    assert splits == 1 or bucket * heads * splits <= 4 * part.sm_count


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 1, 16)])
def test_any_number_of_splits(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One part, more parts than there are tiles, and what the launch rule gives are the same but for the order of sums."""
    found = []
    for splits in (1, 3, 7):
        monkeypatch.setattr(sparse, "retained_splits", lambda *_, splits=splits: splits)
        scene = Scene(shape=shape, retention=0.7)
        scene.run(CAPTURED, "capture", run=checked)
        found.append(scene.run(CONSUMED, "consume", run=checked)[LIVE])
    for out in found[1:]:
        torch.testing.assert_close(out, found[0], atol=2e-5, rtol=2e-5)


def test_random_mixed_batches_with_holes() -> None:
    check_batches(remembering(dtype="float16"), remembering(dtype="float16"), 4, seed=1)
