"""What shipped tables ask for reaches every launch of the loops that it was found for, and no other plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import weight_buffers
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Plan, ProgramKey
from ouro_build.artifacts.presets import PRESETS
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.programs import Programs
from ouro_build.builder.record import residency_key
from ouro_build.kernels.tuning import shipped

H200 = find_part("h200")
ROWS = sorted({asked.rows for asked in shipped(H200).residency})
LARGE = PRESETS["ouro-1.4b"].model


def recorded(model: ModelConfig, rows: int, part: str = "h200") -> dict[ProgramKey, Plan]:
    geometry = Geometry(
        buckets=(rows,), prefill_buckets=(rows,), max_context=1024, max_requests=rows, block_size=16, sparse_modes=SPARSE_MODES,
        key_retention=0.1, key_capacity=112, reference_slots=rows,
    )  # fmt: skip
    buffers = make_buffers(model, geometry, weight_buffers(model))
    return {plan.key: plan for plan in Programs(model, geometry, find_part(part), buffers).record()}


def shared(plan: Plan) -> dict[tuple[str, str], set[tuple[int, int]]]:
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for launch in plan.launches:
        options = launch.specialization.options
        found.setdefault(residency_key(launch), set()).add((options.carveout, options.shared))
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_dense_loops_and_the_head_have_all_of_it(rows: int) -> None:
    asked = {(r.kernel, r.kind): {(r.carveout, r.shared)} for r in shipped(H200).residency if r.rows == rows}
    plans = recorded(LARGE, rows)
    loop, head = (shared(plans[ProgramKey(program, rows)]) for program in ("recurrent", "coda"))
    assert loop | head == asked
    assert all(asked[key] == found for key, found in head.items())


def test_other_plans_have_none_of_it() -> None:
    for key, plan in recorded(LARGE, ROWS[0]).items():
        if key not in (ProgramKey("recurrent", ROWS[0]), ProgramKey("coda", ROWS[0])):
            assert {at for found in shared(plan).values() for _, at in found} == {0}, key


def test_a_model_with_a_launch_of_another_kind_has_none() -> None:
    """Of its loops: what is good for one launch depends on what all others ask for."""
    narrow = recorded(replace(LARGE, intermediate_size=1024), ROWS[0])[ProgramKey("recurrent", ROWS[0])]
    assert {at for found in shared(narrow).values() for _, at in found} == {0}


def test_another_architecture_has_none() -> None:
    for plan in recorded(LARGE, ROWS[0], "l40s").values():
        assert {at for found in shared(plan).values() for _, at in found} == {0}
