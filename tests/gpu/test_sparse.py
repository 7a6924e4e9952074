"""The kernels of sparse attention on a device, compiled, in the programs that builds record of them."""

import pytest
import torch

from ouro_build.artifacts.plan import Launch
from ouro_build.artifacts.rows import ReferenceRecord
from tests.kernel_cases import attention_select
from tests.kernel_cases.attention import LAYER, context
from tests.kernel_cases.sparse import (
    CAPTURED,
    CONSUMED,
    LATER,
    Row,
    Rows,
    Run,
    Scene,
    Tensors,
    bits,
    check_batches,
    checked,
)
from tests.kernel_harness import Values, run_reference, run_source

DTYPES = ["bfloat16", "float16", "float32"]
SHAPES = ((4, 4, 64), (2, 2, 128), (6, 2, 32), (8, 1, 128), (6, 2, 16))
LIVE = [i for i, row in enumerate(CAPTURED) if row is not None]
LONG = 65536
# Contexts around the selection's steps and the largest there is.
LONG_ROWS: Rows = (
    Row(0, LONG - 1, slot=0), Row(0, LONG - 2, slot=1), None, Row(0, 1023, slot=2), Row(0, 1024, slot=3),
    Row(1, 8191, slot=4), Row(1, 4095, slot=5), None,
)  # fmt: skip


def remembering(dtype: str, shape: tuple[int, int, int]) -> Scene:
    """A scene in whose slots the rows of CAPTURED are remembered."""
    scene = Scene(dtype, "cuda", shape)
    scene.run(CAPTURED, "capture")
    return scene


def later(rows: Rows) -> Rows:
    """`rows` in a loop that consumes."""
    return tuple(row and Row(row.request, row.position, LATER, row.mode, row.slot, row.generation) for row in rows)


@pytest.fixture(scope="module")
def long() -> Scene:
    ctx = context("bfloat16", "cuda", 2, 128, lengths=(LONG, 8192))
    return Scene("bfloat16", "cuda", (2, 2, 128), 0.1, max_context=LONG, lengths=(LONG, 8192), ctx=ctx)


@pytest.mark.parametrize("width", [3000, 16384, 32768, LONG])
@pytest.mark.parametrize("kind", attention_select.KINDS)
def test_selection_matches_the_reference(kind: str, width: int) -> None:
    for retention in (1e-4, 0.1, 0.5, 1.0):
        attention_select.case(kind, "cuda", width, retention, heads=16).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_matches_its_reference(shape: tuple[int, int, int], dtype: str) -> None:
    scene = Scene(dtype, "cuda", shape)
    scene.run(CAPTURED, "capture", run=checked)
    scene.run(CONSUMED, "consume", run=checked)
    scene.run(CONSUMED, "mixed", run=checked)


@pytest.mark.parametrize("block_size", [8, 48, 128])
def test_blocks_of_eights(block_size: int) -> None:
    scene = Scene("bfloat16", "cuda", (4, 2, 64), block_size=block_size)
    scene.run(CAPTURED, "capture", run=checked)
    scene.run(CONSUMED, "consume", run=checked)


def test_long_contexts_match_the_reference(long: Scene) -> None:
    long.run(LONG_ROWS, "capture", run=checked)
    assert long.tensors["reference_records"][0, LAYER, ReferenceRecord.COUNT] == 6554
    long.run(later(LONG_ROWS), "consume", run=checked)


def test_many_equal_scores_in_a_long_context(long: Scene) -> None:
    """Keys in which only every fifth differs: the cut-off falls among thousands of equal scores."""
    kept = long.tensors["kv"][:, :, 0].clone()
    long.tensors["kv"][:, :, 0] = 1.0
    long.tensors["kv"][:, :, 0, :, ::5] = 1.125
    long.run(LONG_ROWS, "capture", run=checked)
    long.tensors["kv"][:, :, 0] = kept


def test_the_same_input_gives_the_same_bits(long: Scene) -> None:
    first = long.run(LONG_ROWS, "capture")
    held, consumed = long.remembered, long.run(later(LONG_ROWS), "consume")
    for _ in range(20):
        assert bits(long.run(LONG_ROWS, "capture")).equal(bits(first))
        assert all(bits(tensor).equal(bits(held[name])) for name, tensor in long.remembered.items())
        assert bits(long.run(later(LONG_ROWS), "consume")).equal(bits(consumed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_capture_gives_the_dense_output_bit_for_bit(shape: tuple[int, int, int], dtype: str) -> None:
    scene = Scene(dtype, "cuda", shape)
    dense = bits(scene.run(CAPTURED, "dense"))
    for mode in ("capture", "mixed"):
        assert bits(scene.run(CAPTURED, mode)).equal(dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_slot_remembers_its_own_rows_output(shape: tuple[int, int, int], dtype: str) -> None:
    for mode in ("capture", "mixed"):
        scene = Scene(dtype, "cuda", shape)
        want = scene.remembered["reference_output"]
        out = scene.run(CAPTURED, mode)
        for i, row in enumerate(CAPTURED):
            if row is not None:
                want[row.slot, LAYER] = out[i].float()
        assert bits(scene.remembered["reference_output"]).equal(bits(want)), mode


def test_capture_gives_the_dense_output_in_long_contexts(long: Scene) -> None:
    assert bits(long.run(LONG_ROWS, "capture")).equal(bits(long.run(LONG_ROWS, "dense")))


@pytest.mark.parametrize("shape", SHAPES)
def test_consuming_at_the_source_loop_gives_the_output_back(shape: tuple[int, int, int]) -> None:
    scene = Scene("float32", "cuda", shape)
    out = scene.run(CAPTURED, "capture")[LIVE]
    torch.testing.assert_close(scene.run(CAPTURED, "consume")[LIVE], out, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 4, 64), (6, 2, 32), (8, 1, 128)])
def test_a_thousand_random_mixed_batches(shape: tuple[int, int, int], dtype: str) -> None:
    count = 1000 if dtype == "bfloat16" else 100
    check_batches(remembering(dtype, shape), remembering(dtype, shape), count, seed=count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_keys_are_retained_only_among_near_ties(dtype: str, long: Scene) -> None:
    """The reference selects from its own scores: a key may differ only within the error of a score at the cut-off."""
    scene, rows = (long, LONG_ROWS) if dtype == "bfloat16" else (Scene(dtype, "cuda", (4, 4, 64)), CAPTURED)
    got, want = (_captured(scene, rows, run) for run in (run_source, run_reference))
    counted = differing = 0
    for i, row in enumerate(rows):
        if row is None:
            continue
        n = row.position + 1
        count = int(scene.tensors["retained_counts"][n])
        ours, theirs = got["scores"][i, :, :n], want["scores"][i, :, :n]
        error = (ours - theirs).abs().amax()
        for head in range(ours.shape[0]):
            chosen, others = (set(x["reference_keys"][row.slot, LAYER, head, :count].tolist()) for x in (got, want))
            cut = theirs[head, list(others)].min()
            odd = sorted(chosen ^ others)
            assert ((theirs[head, odd] - cut).abs() <= 2 * error).all(), (row, head)
            counted, differing = counted + count, differing + len(odd) // 2
    print(f"{dtype}: {differing} of {counted} retained keys are not the reference's")


def _captured(scene: Scene, rows: Rows, run: Run) -> Tensors:
    """What a capture leaves: the slots' contents and the scores."""
    found: Tensors = {}

    def keep(launch: Launch, tensors: Tensors, values: Values) -> None:
        run(launch, tensors, values)
        found.update({name: tensors[name] for name in tensors if name == "scores"})

    scene.run(rows, "capture", run=keep)
    return {**found, **scene.remembered}
