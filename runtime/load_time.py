"""The values that only a worker knows, and the check that they are what the kernels were compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ouro_build.artifacts.columns import LoadTimeEntry
from ouro_build.artifacts.errors import FitError
from ouro_build.artifacts.manifest import KvLayout
from ouro_build.artifacts.plan import LoadTimeValue

Values = Mapping[LoadTimeValue, int]


def load_time_values(kv: KvLayout, kv_blocks: int, sm_count: int) -> Values:
    """Every load-time value of a worker with `kv_blocks` blocks laid out as `kv` on a device of `sm_count` multiprocessors.

    Raises FitError for blocks so far from each other that kernels, which take that distance for 32 bits, would not find them.
    """
    block, planes = kv.block_elements, sum(map(len, kv.planes))
    planes_outer = kv.axes[0] == "plane"
    stride = block if planes_outer else planes * block
    if stride >= 2**32:
        raise FitError(f"KV blocks lie {stride} elements apart, kernels find them up to {2**32 - 1}", where="kv")
    return {
        LoadTimeValue.KV_BLOCKS: kv_blocks,
        LoadTimeValue.KV_PLANE_STRIDE: kv_blocks * block if planes_outer else block,
        LoadTimeValue.SM_COUNT: sm_count,
        LoadTimeValue.KV_BLOCK_STRIDE: stride,
    }


def check_divisors(values: Values, entries: Iterable[LoadTimeEntry]) -> None:
    """Raise FitError if a value lacks the divisor that images were compiled with."""
    for entry in entries:
        if values[entry.name] % entry.divisor:
            value = values[entry.name]
            raise FitError(f"{entry.name.value} is {value}, a multiple of {entry.divisor} is needed", where="plans")
