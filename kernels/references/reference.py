"""Finding rows' reference slots in torch references."""

from torch import Tensor

from ouro_build.artifacts.rows import ReferenceRecord, Row
from ouro_build.kernels.rows import active


def with_slot(rows: Tensor, slots: int) -> list[tuple[int, int]]:
    """(row, reference slot) of every active row that names one of the `slots`."""
    found = ((row, int(rows[row, Row.REFERENCE_SLOT])) for row in active(rows)[0].tolist())
    return [(row, slot) for row, slot in found if 0 <= slot < slots]


def count_of(record: Tensor, reference_records: Tensor, layer: int, capacity: int) -> int:
    """Retained keys at `layer` of the row's reference slot; 0 if it names none, it was bound to another, or holds nothing."""
    slot = int(record[Row.REFERENCE_SLOT])
    if not 0 <= slot < len(reference_records):
        return 0
    found = reference_records[slot, layer]
    count = int(found[ReferenceRecord.COUNT])
    return count if found[ReferenceRecord.GENERATION] == record[Row.GENERATION] and 0 < count <= capacity else 0
