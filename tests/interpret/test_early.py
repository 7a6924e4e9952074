"""What a kernel reads before its wait: nothing that may still be being written.

Programs are interpreted one after another. When one starts, keys and values that the batch's rows write are NaN, and when it
has waited, they are there: just as if the projection that writes them had ended then.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import Tensor

from ouro_build.artifacts.plan import Launch
from ouro_build.kernels.attention_capture import source as capture_source
from ouro_build.kernels.attention_decode import source as decode_source
from ouro_build.kernels.attention_retained import source as retained_source
from tests.kernel_cases import PART, Case
from tests.kernel_cases.attention import DECODE_ROWS, LAYER, LAYERS, context, decode_case
from tests.kernel_cases.sparse import CAPTURED, CONSUMED, Scene, Tensors
from tests.kernel_harness import Values, run_source

BLOCK_SIZE = 16
# Where a kernel says that it has started, and where it waits.
ENDS = {
    "attention_decode": (decode_source, decode_source),
    "attention_capture": (capture_source, decode_source),
    "attention_retained": (retained_source, retained_source),
}


def run_late(launch: Launch, tensors: Tensors, values: Values, take: Callable[[Tensor], None]) -> None:
    """Run the launch where a program does not find in the tensor `kv` what `take` takes until it has waited."""
    starts, waits = ENDS[launch.specialization.kernel]
    kv, counts = tensors["kv"], {"release": 0, "wait": 0}
    right = kv.clone()

    def release(_: bool) -> None:
        counts["release"] += 1
        take(kv)

    def wait(_: bool) -> None:
        counts["wait"] += 1
        kv.copy_(right)

    with patch.object(starts, "release", release), patch.object(waits, "wait", wait):
        run_source(launch, tensors, values)
    assert counts["release"] == counts["wait"] > 0


def of_rows(case: Case) -> Callable[[Tensor], None]:
    """Takes what the rows of DECODE_ROWS write."""
    tables = case.tensors["block_tables"]
    places = [
        (loop * LAYERS + LAYER, int(tables[request, position // BLOCK_SIZE]), position % BLOCK_SIZE)
        for request, position, loop in (row for row in DECODE_ROWS if row)
    ]

    def take(kv: Tensor) -> None:
        for plane, block, offset in places:
            kv[plane, block, :, :, offset] = float("nan")

    return take


def everything(kv: Tensor) -> None:
    """Takes all keys and values."""
    kv.fill_(float("nan"))


@pytest.mark.parametrize("multiprocessors", [1, PART.sm_count])
@pytest.mark.parametrize(("shape", "dtype"), [((4, 4, 16), "float32"), ((4, 4, 32), "float16"), ((6, 2, 32), "float32")])
def test_decode_attention_reads_what_its_batch_writes_after_the_wait(
    shape: tuple[int, int, int], dtype: str, multiprocessors: int
) -> None:
    part = msgspec.structs.replace(PART, sm_count=multiprocessors)
    case = decode_case(dtype, shape=shape, part=part, ctx=context(dtype, "cpu", shape[1], shape[2], BLOCK_SIZE))
    got, want = ({name: t.clone() for name, t in case.tensors.items()} for _ in range(2))
    run_source(case.launch, want, case.values)
    run_late(case.launch, got, case.values, of_rows(case))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    # A single head's other keys are read before. With one multiprocessor no program begins with such.
    run_late(case.launch, got, case.values, everything)
    assert got["partial"].nan_to_num(9).equal(want["partial"].nan_to_num(9)) == (shape == (6, 2, 32) or multiprocessors == 1)


@pytest.mark.parametrize("mode", ["capture", "consume", "mixed"])
@pytest.mark.parametrize("shape", [(2, 2, 16), (6, 2, 32)])
def test_sparse_attention_reads_what_its_batch_writes_after_the_wait(mode: str, shape: tuple[int, int, int]) -> None:
    rows = CONSUMED if mode == "consume" else CAPTURED
    scenes = [Scene(shape=shape) for _ in range(2)]
    new = [(loop * LAYERS + LAYER, row) for row in rows if row for loop in [row.loop]]

    def take(kv: Tensor) -> None:
        for plane, row in new:
            block = int(scenes[0].ctx.tables[row.request, row.position // BLOCK_SIZE])
            kv[plane, block, :, :, row.position % BLOCK_SIZE] = float("nan")

    def run(launch: Launch, tensors: Tensors, values: Values) -> None:
        run_late(launch, tensors, values, take) if launch.specialization.kernel in ENDS else run_source(launch, tensors, values)

    for scene in scenes:
        scene.run(CAPTURED, "capture")
    want, got = scenes[0].run(rows, mode), scenes[1].run(rows, mode, run=run)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scenes[1].remembered, scenes[0].remembered, rtol=0, atol=0, equal_nan=True)
