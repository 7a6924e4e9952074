from ouro_build.kernels.embedding import embedding
from tests.kernel_cases import PART, ROWS, SLOTS, Case, normal
from tests.kernel_harness import buffer, in_blocks, matrix_buffer, poisoned, row_records

SIZES = (64, 96, 1100)
VOCABULARY = 50


def case(dtype: str, device: str = "cpu", size: int = 96) -> Case:
    hidden = buffer("hidden", dtype, SLOTS, size)
    launch = embedding(
        PART, rows=buffer("rows", "int32", len(ROWS), 8), weight=matrix_buffer("weight", dtype, VOCABULARY, size), hidden=hidden
    )
    tensors = {
        "rows": row_records(ROWS, device, token=[7, -1, 0, VOCABULARY - 1]),
        "weight": in_blocks(normal(device, dtype, VOCABULARY, size)),
        "hidden": poisoned(hidden, device=device),
    }
    return Case(launch, tensors)
