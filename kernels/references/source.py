"""Finding a row's reference slot in Triton sources, and whether it holds what this row captured."""

import triton
import triton.language as tl


@triton.jit
def slot_of(record, SLOTS: tl.constexpr):
    """The reference slot of a row's record; -1 if the row is inactive or names none of the SLOTS."""
    slot = tl.load(record + 5, cache_modifier=".cg")
    return tl.where((tl.load(record, cache_modifier=".cg") >= 0) & (slot >= 0) & (slot < SLOTS), slot, -1)


@triton.jit
def count_of(record, slot, reference_records, layer, LAYERS: tl.constexpr, CAPACITY: tl.constexpr):
    """Retained keys at `layer` of reference slot `slot`; 0 if that is -1, was bound to another row since, or holds nothing."""
    at = reference_records + (slot.to(tl.int64) * LAYERS + layer) * 2
    count = tl.load(at + 1, mask=slot >= 0, other=0, cache_modifier=".cg")
    mine = tl.load(at, mask=slot >= 0, other=0, cache_modifier=".cg") == tl.load(record + 6, cache_modifier=".cg")
    return tl.where(mine & (count > 0) & (count <= CAPACITY), count, 0)
