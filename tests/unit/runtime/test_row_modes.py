"""The host follows what rows do, and refuses a step that would read what is not a row's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.rows import SOURCE_LOOP, Mode, ReferenceRecord
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.engine import Request
from ouro_build.runtime.references import Lease, ReferencePool
from ouro_build.runtime.row_modes import RowModes
from ouro_build.runtime.step import Steps
from tests.reference_worker import ReferenceWorker, reference_worker

LOOPS = 4
ALL = ("dense", "capture", "consume", "mixed")


@cache
def worker(retention: float = 0.2) -> ReferenceWorker:
    return reference_worker(
        "preset:tiny", buckets=(1, 2, 4), prefill_buckets=(16,), max_context=32, max_requests=4,
        sparse=SparseSpec(ALL, retention),
    )  # fmt: skip


def sparse(slot: int, lease: Lease, mode: Mode = Mode.CAPTURE) -> RowInput:
    return RowInput(slot, mode=mode, reference_slot=lease.slot, generation=lease.generation)


def modes_of(modes: RowModes, bucket: int, count: int) -> list[str]:
    """What the next `count` loops run in."""
    found = []
    for _ in range(count):
        mode, variant = modes.next_loop(bucket)
        modes.begin_loop(bucket, mode, variant)
        modes.ran("recurrent", bucket)
        found.append("/".join(filter(None, (mode, variant))))
    return found


def followed() -> tuple[RowModes, ReferencePool]:
    pool = ReferencePool(4, lambda slots: None)
    return RowModes(LOOPS, pool), pool


def test_a_batch_of_one_kind_runs_uniform_modes() -> None:
    modes, pool = followed()
    first, second = pool.bind("a", 2)
    modes.describe([sparse(0, first), sparse(1, second)], [0, 1])
    modes.ran("prelude", 2)
    assert modes_of(modes, 2, LOOPS) == ["dense", "capture", "consume", "consume"]
    modes.ran("advance", 2)
    modes.describe([RowInput(1), RowInput(0)], [0, 1])
    modes.ran("prelude", 2)
    assert modes_of(modes, 2, LOOPS) == ["dense", "capture", "consume", "consume"]


def test_rows_of_several_kinds_run_mixed_and_whether_any_captures_is_known() -> None:
    modes, pool = followed()
    early, late = pool.bind("a", 2)
    modes.describe([sparse(0, early)], ())
    modes.ran("prelude", 1)
    assert modes_of(modes, 1, 2) == ["dense", "capture"]
    modes.describe([sparse(1, late)], ())
    modes.ran("prelude", 1)
    modes.describe([RowInput(0), RowInput(-1), RowInput(1)], ())  # two loops apart
    assert modes_of(modes, 4, 2) == ["mixed/no_capture", "mixed"]
    assert modes_of(modes, 4, 2) == ["consume", "consume"]


def test_dense_rows_stay_dense_beside_sparse_ones() -> None:
    modes, pool = followed()
    (lease,) = pool.bind("a")
    modes.describe([RowInput(3, 5, 0, 0, 0), sparse(0, lease)], ())
    modes.ran("prelude", 2)
    assert modes_of(modes, 2, LOOPS) == ["dense", "mixed", "mixed/no_capture", "mixed/no_capture"]


def test_a_slot_that_is_started_anew_is_dense_again() -> None:
    modes, pool = followed()
    (lease,) = pool.bind("a")
    modes.describe([sparse(0, lease)], ())
    modes.ran("prelude", 1)
    modes.describe([RowInput(0, 5, 0, 0, 0)], ())
    modes.ran("prelude", 1)
    assert modes_of(modes, 1, LOOPS) == ["dense"] * LOOPS


def test_without_reference_slots_modes_need_none() -> None:
    modes = RowModes(LOOPS, None)
    modes.describe([RowInput(0, mode=Mode.CAPTURE)], ())
    modes.ran("prelude", 1)
    assert modes_of(modes, 1, LOOPS) == ["dense", "capture", "consume", "consume"]


def started(steps: Steps, *rows: RowInput) -> None:
    steps.describe(rows, [row.slot for row in rows])
    steps.run("prelude", len(rows))


def stale(steps: Steps, pool: ReferencePool) -> None:
    (lease,) = pool.bind("x")
    steps.decode([sparse(0, lease)._replace(token=5, position=0, request=0, block=0)])
    pool.retire([lease])
    steps.decode([RowInput(0)])


def named_stale(steps: Steps, pool: ReferencePool) -> None:
    (lease,) = pool.bind("x")
    fresh = pool.reject(lease)
    try:
        steps.describe([sparse(0, lease)])
    finally:
        pool.retire([fresh])


def never_captured(steps: Steps, pool: ReferencePool) -> None:
    (lease,) = pool.bind("x")
    try:
        started(steps, sparse(0, lease, Mode.CONSUME)._replace(position=0, token=1, request=0, block=0))
        steps.run_loop(1)
    finally:
        pool.retire([lease])


def passed_over(steps: Steps, pool: ReferencePool) -> None:
    """A token is decoded and captures; the next runs its source loop dense, by hand."""
    (lease,) = pool.bind("x")
    try:
        steps.decode([sparse(0, lease)._replace(token=5, position=0, request=0, block=0)])
        steps.describe([RowInput(0)])
        steps.run("prelude", 1)
        for _ in range(SOURCE_LOOP + 1):
            steps.run("recurrent", 1)
        steps.run_loop(1)
    finally:
        pool.retire([lease])


def passed_over_in_a_prompt(steps: Steps, pool: ReferencePool) -> None:
    """So does a row whose loops are those of a prompt, in a token begun by `advance`, before a `mixed` loop by hand."""
    (lease,) = pool.bind("x")
    try:
        steps.decode([sparse(0, lease)._replace(token=5, position=0, request=0, block=0)])
        for _ in range(SOURCE_LOOP + 1):
            steps.run("prefill", 1)
        steps.run("recurrent", 1, "mixed")
    finally:
        pool.retire([lease])


def too_early(steps: Steps, pool: ReferencePool) -> None:
    """A program of one mode does not ask the row for its own, nor which loop it is in."""
    (lease,) = pool.bind("x")
    try:
        steps.decode([sparse(0, lease)._replace(token=5, position=0, request=0, block=0)])
        steps.run("recurrent", 1, "consume")
    finally:
        pool.retire([lease])


def no_slot(steps: Steps, pool: ReferencePool) -> None:
    started(steps, RowInput(0, 1, 0, 0, 0, Mode.CONSUME, steps.geometry.padding_slot))
    steps.run_loop(1)


def captures_in_no_capture(steps: Steps, pool: ReferencePool) -> None:
    (lease,) = pool.bind("x")
    try:
        started(steps, sparse(0, lease)._replace(position=0, token=1, request=0, block=0))
        steps.run_loop(1)
        steps.run("recurrent", 1, "mixed", "no_capture")
    finally:
        pool.retire([lease])


def shared(steps: Steps, pool: ReferencePool) -> None:
    (lease,) = pool.bind("x")
    try:
        started(steps, *(sparse(i, lease)._replace(position=0, token=1, request=i, block=i) for i in range(2)))
        steps.run_loop(2)
        steps.run_loop(2)
    finally:
        pool.retire([lease])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (stale, "is retired"),
        (named_stale, "row 0: generation .* is stale"),
        (never_captured, "has captured nothing yet"),
        (passed_over, "has captured nothing for its present token"),
        (passed_over_in_a_prompt, "has captured nothing for its present token"),
        (too_early, "has captured nothing for its present token"),
        (no_slot, "has no reference slot to consume"),
        (captures_in_no_capture, "captures in this loop"),
        (shared, "two rows capture into one reference slot"),
    ],
)
def test_steps_that_would_read_what_is_not_the_rows_own(call: Callable[[Steps, ReferencePool], None], message: str) -> None:
    steps = worker().steps
    assert steps.references is not None
    with pytest.raises(RequestError, match=message):
        call(steps, steps.references)
    steps.references.finished(steps.references.submitted())
    assert steps.references.free == 4


def test_a_capture_that_could_not_be_submitted_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, pool = worker().steps, worker().steps.references
    assert pool is not None
    (lease,) = pool.bind("x")
    started(steps, sparse(0, lease)._replace(position=0, token=1, request=0, block=0))
    steps.run_loop(1)

    def refuse(*_: object) -> None:
        raise RequestError("no plan for it")

    with monkeypatch.context() as patched:
        patched.setattr(steps._dispatcher, "run", refuse)
        with pytest.raises(RequestError, match="no plan for it"):
            steps.run_loop(1)
    with pytest.raises(RequestError, match="has captured nothing yet"):
        steps.run("recurrent", 1, "consume")
    assert [steps.run_loop(1) for _ in range(2)] == ["capture", "consume"]
    pool.retire([lease])
    pool.finished(pool.submitted())


def test_a_row_may_mean_what_its_slot_holds_from_before() -> None:
    modes, pool = followed()
    (lease,) = pool.bind("a")
    modes.describe([sparse(0, lease)], [0])
    modes.ran("prelude", 1)
    assert modes_of(modes, 1, LOOPS) == ["dense", "capture", "consume", "consume"]
    modes.ran("advance", 1)
    modes.describe([RowInput(0, mode=Mode.CONSUME)], [0])
    modes.ran("prelude", 1)
    assert modes_of(modes, 1, LOOPS) == ["consume"] * LOOPS


def test_retiring_clears_what_gates_readers_and_nothing_else() -> None:
    made = worker()
    steps, pool = made.steps, made.steps.references
    assert pool is not None
    (lease,) = pool.bind("x")
    steps.decode([sparse(1, lease)._replace(position=0, token=1, request=1, block=4)])

    def slot(name: str) -> NDArray[np.generic]:
        buffer = steps.buffers[name]
        raw = made.memory.read(Pool.REFERENCES, buffer.offset, buffer.bytes)
        values: NDArray[np.generic] = raw.view(buffer.dtype).reshape(buffer.sizes)[lease.slot]
        return values

    assert (slot("reference_records")[:, ReferenceRecord.GENERATION] == lease.generation).all()
    assert (slot("reference_records")[:, ReferenceRecord.COUNT] == 1).all()
    payload = [slot(name).copy() for name in ("reference_keys", "reference_output", "reference_contribution")]
    assert slot("reference_output").any()
    pool.retire([lease])
    assert not slot("reference_records").any()
    assert not slot("reference_mass").any()
    names = ("reference_keys", "reference_output", "reference_contribution")
    assert all(np.array_equal(slot(name), before) for name, before in zip(names, payload, strict=True))
    assert pool.free == 4


def test_requests_wait_for_reference_slots_and_all_are_served() -> None:
    made = reference_worker(
        "preset:tiny", buckets=(1, 4), prefill_buckets=(16,), max_context=32, max_requests=4,
        sparse=SparseSpec(ALL, 0.2, reference_slots=2),
    )  # fmt: skip
    alone = []
    for prompt in ([1, 2], [3], [4, 5, 6], [7]):
        request = Request(prompt, 5)
        engine = made.engine(sparse=True)
        engine.submit(request)
        engine.run()
        alone.append(request.ids)
    requests = [Request(prompt, 5) for prompt in ([1, 2], [3], [4, 5, 6], [7])]
    engine = made.engine(sparse=True)
    for request in requests:
        engine.submit(request)
    engine.run()
    assert [r.ids for r in requests] == alone
    assert made.steps.references is not None
    assert made.steps.references.free == 2
    held = made.steps.references.bind("another", 2)
    engine = made.engine(sparse=True)
    engine.submit(Request([1], 2))
    with pytest.raises(RequestError, match="1 reference slots wanted, 0 of 2 free"):
        engine.run()
    made.steps.references.retire(held)


def test_a_sparse_artifact_runs_dense_on_demand_and_gives_the_dense_tokens() -> None:
    dense = reference_worker("preset:tiny", buckets=(1, 2, 4), prefill_buckets=(16,), max_context=32, max_requests=4)
    for made, options in ((dense, {}), (worker(), {"sparse": False}), (worker(1.0), {"sparse": True})):
        request = Request([5, 6, 7], 12)
        engine = made.engine(**options)
        engine.submit(request)
        engine.run()
        if made is dense:
            want = request.ids
        assert request.ids == want


def test_what_a_failed_step_held_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker()
    engine = made.engine(sparse=True)
    engine.submit(Request([1, 2, 3], 4))

    def refuse(*_: object, **__: object) -> None:
        raise RequestError("not today")

    monkeypatch.setattr(made.steps, "submit_decode", refuse)
    with pytest.raises(RequestError, match="not today"):
        engine.run()
    assert made.steps.references is not None
    assert made.steps.references.free == 4
    assert not engine.step()


def test_what_was_captured_before_a_loop_was_refused_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's step is under way, and a capture of the next is submitted, when its loop is refused."""
    made = worker()
    run = made.steps.run

    def refuse(program: str, rows: int, mode: str = "dense", variant: str = "") -> None:
        if mode == "consume":
            raise RequestError("not today")
        run(program, rows, mode, variant)

    monkeypatch.setattr(made.steps, "run", refuse)
    engine = made.engine(sparse=True)
    engine.submit(Request([1, 2, 3], 4))
    with pytest.raises(RequestError, match="not today"):
        engine.run()
    assert made.steps.references is not None
    assert (made.steps.references.free, made.steps.references.leaving) == (4, 0)
    assert not engine.step()


def test_a_slot_is_anothers_only_after_the_step_under_way_that_reads_it() -> None:
    """A stop token is seen while the next step is under way: it reads the slot of the request that has ended."""
    made = reference_worker(
        "preset:tiny", buckets=(1, 2), prefill_buckets=(16,), max_context=32, max_requests=2,
        sparse=SparseSpec(ALL, 0.2, reference_slots=1),
    )  # fmt: skip
    references = made.steps.references
    assert references is not None
    first = Request([1, 2], 8)
    engine = made.engine(sparse=True)
    engine.submit(first)
    engine.run()
    stop = first.ids[3]
    wanted = first.ids[: first.ids.index(stop) + 1]
    requests = [Request([1, 2], 8, frozenset([stop])), Request([1, 2], 8, frozenset([stop]))]
    engine = made.engine(sparse=True)
    for request in requests:
        engine.submit(request)
    while requests[0].finish_reason is None:
        engine.step()
    assert (references.free, references.leaving) == (0, 1)
    assert engine.step(), "it reads what is under way, and the other request waits meanwhile"
    assert requests[1].blocks == []
    assert (references.free, references.leaving) == (1, 0)
    engine.run()
    assert [r.ids for r in requests] == [wanted, wanted]
    assert references.free == 1


def test_a_prompt_chunk_that_nobody_reads_frees_nothing() -> None:
    made = worker()
    references = made.steps.references
    assert references is not None
    made.steps.prefill([RowInput(0, 5, 0, request=0, block=0)], [0])
    (lease,) = references.bind("a")
    step = made.steps.submit_decode([sparse(0, lease)])
    references.retire([lease])
    made.steps.prefill([RowInput(made.steps.geometry.decode_slots, 5, 0, request=1, block=1)])
    assert (references.free, references.leaving) == (3, 1)
    step.result()
    assert (references.free, references.leaving) == (4, 0)


def test_steps_of_several_modes_are_counted_as_sparse() -> None:
    made = worker()
    made.coverage.clear()
    engine = made.engine(sparse=True)
    engine.submit(Request([1, 2, 3], 3))
    engine.run()
    assert [(s.mode, s.rows, s.loops, s.count) for s in made.coverage.record().steps] == [("sparse", 1, LOOPS, 2)]
