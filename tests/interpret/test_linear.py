"""Both linear kernels and the choice between them."""

import pytest
import torch

from ouro_build.artifacts.parts import PARTS, Part, find_part
from ouro_build.kernels.linear import linear
from tests.kernel_cases.linear import SHAPES, case
from tests.kernel_harness import buffer, matrix_buffer, run_source

DTYPES = ["float32", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "bucket"), [*(("linear_few", bucket) for bucket in (1, 2, 3, 7, 12)), ("linear_many", 40)])
def test_matches_the_reference(name: str, bucket: int, shape: tuple[int, int], dtype: str) -> None:
    case(name, dtype, bucket=bucket, shape=shape).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "bucket"), [("linear_few", 1), ("linear_few", 2), ("linear_few", 24), ("linear_many", 70)])
def test_gathers_by_slot_into_float32_over_an_odd_vocabulary(name: str, bucket: int, dtype: str) -> None:
    case(name, dtype, bucket=bucket, shape=(513, 96), out_dtype="float32", gather=True).check()


@pytest.mark.parametrize(("name", "bucket"), [("linear_few", 4), ("linear_few", 12), ("linear_many", 40)])
def test_a_row_does_not_depend_on_its_neighbours(name: str, bucket: int) -> None:
    c = case(name, "float16", bucket=bucket, shape=(96, 176))
    together = {key: t.clone() for key, t in c.tensors.items()}
    run_source(c.launch, together)
    alone = {key: t.clone() for key, t in c.tensors.items()}
    alone["rows"][:2, 0] = -1
    run_source(c.launch, alone)
    assert torch.equal(alone["out"][2:bucket].view(torch.int16), together["out"][2:bucket].view(torch.int16))


def test_an_inactive_batch_writes_nothing_where_rows_are_gathered() -> None:
    """Within a program the kernel for few rows writes whatever inactive rows make: outputs that the host reads it does not."""
    for name, bucket in (("linear_few", 1), ("linear_few", 8), ("linear_many", 33)):
        c = case(name, "float16", bucket=bucket, gather=True)
        c.tensors["rows"][:, 0] = -1
        before = c.tensors["out"].view(torch.int16).clone()
        run_source(c.launch, c.tensors)
        assert torch.equal(c.tensors["out"].view(torch.int16), before)


@pytest.mark.parametrize(
    ("bucket", "dtype", "name"),
    [(1, "bfloat16", "linear_few"), (32, "bfloat16", "linear_few"), (33, "bfloat16", "linear_many"),
     (4, "float32", "linear_few"), (5, "float32", "linear_many")],
)  # fmt: skip
def test_the_number_of_rows_chooses_the_kernel(bucket: int, dtype: str, name: str) -> None:
    launch = linear(
        find_part("h200"),
        rows=buffer("rows", "int32", bucket, 8),
        x=buffer("x", dtype, bucket, 64),
        weight=matrix_buffer("weight", dtype, 32, 64),
        out=buffer("out", dtype, bucket, 32),
    )
    assert launch.specialization.kernel == name


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_the_pipeline_fits_in_shared_memory(part: Part) -> None:
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for bucket in (64, 512, 4096):
            launch = case("linear_many", dtype, bucket=bucket, shape=(11264, 64), part=part).launch
            c = {name: value for name, value in launch.specialization.constants if isinstance(value, int)}
            stages = launch.specialization.options.num_stages
            assert (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * size * stages <= part.shared
            assert stages >= 3
