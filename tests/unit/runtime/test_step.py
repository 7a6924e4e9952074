"""What a caller's own scheduler may hand over: what nothing has is refused before the device sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from ouro_build.artifacts import rows as columns
from ouro_build.artifacts.errors import ArtifactError, RequestError
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.rows import Mode
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.step import Steps
from tests.reference_worker import ReferenceWorker, reference_worker

GOOD = RowInput(slot=0, token=5, position=0, request=0, block=0)


@cache
def worker() -> ReferenceWorker:
    return reference_worker("preset:tiny", buckets=(1, 2), prefill_buckets=(4,), max_context=32, max_requests=2)


def io() -> NDArray[np.uint8]:
    return worker().memory.read(Pool.IO, 0, worker().memory.size(Pool.IO))


def test_a_row_has_the_columns_that_the_device_reads() -> None:
    assert [name.upper() for name in RowInput._fields] == [column.name for column in columns.InputColumn]
    assert len(columns.InputColumn) == len(columns.Row) == columns.RECORD


@pytest.mark.parametrize(
    ("column", "limit"),
    [("slot", 2 + 4), ("token", 512), ("position", 32), ("request", 2), ("block", 2 * 2), ("mode", 3), ("reference_slot", 1)],
)
def test_values_that_nothing_has_never_reach_the_device(column: str, limit: int) -> None:
    for value in (limit, -2, 2**31, 2**40):
        worker().memory.fill(Pool.IO, 0xA5)
        before = io()
        with pytest.raises(RequestError, match=f"row 1: {column} is {value}, below {limit} expected"):
            worker().steps.describe([GOOD, RowInput(**{**RowInput(1)._asdict(), column: value})])
        assert np.array_equal(io(), before)
    worker().steps.describe([RowInput(**{**GOOD._asdict(), column: limit - 1})])


def test_a_row_without_a_block_writes_no_keys_and_values() -> None:
    """One that comes to a block that nobody bound, and one that starts in the middle of such a block."""
    steps, memory = worker().steps, worker().memory
    memory.fill(Pool.STATE, 0xFF)
    size = steps.geometry.block_size
    steps.decode([GOOD])
    for _ in range(size - 1):
        steps.decode([RowInput(0)])
    before = memory.read(Pool.KV, 0, memory.size(Pool.KV)).copy()
    steps.decode([RowInput(0), RowInput(1, token=5, position=size + 1, request=1)])
    assert np.array_equal(memory.read(Pool.KV, 0, memory.size(Pool.KV)), before)
    steps.decode([GOOD._replace(slot=1, request=1, block=1)])
    assert not np.array_equal(memory.read(Pool.KV, 0, memory.size(Pool.KV)), before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.describe([GOOD, GOOD]), "two rows name one state slot"),
        (lambda s: s.describe([GOOD, RowInput(1, token=5, position=0)]), "row 1: it has a position and no request"),
        (lambda s: s.describe([RowInput(1, position=0, request=0, block=0)]), "row 0: it has a position and no token"),
        (lambda s: s.describe([RowInput(i) for i in range(5)]), "5 rows, there is room for 4"),
        (lambda s: s.run("prefill", 5), "5 rows, the largest bucket of prefill is 4"),
        (lambda s: s.run("prelude", 5), "5 rows, the largest bucket of prelude is 4"),
        (lambda s: s.run("recurrent", 3), "3 rows, the largest bucket of recurrent is 2"),
        (lambda s: s.run("nothing", 1), "no plan for nothing/1"),
        (lambda s: s.collect(3), "3 rows, a step samples for 0 … 2"),
        (lambda s: s.collect(-1), "-1 rows, a step samples for 0 … 2"),
        (lambda s: s.coda([6]), "slot 6, below 6 expected"),
        (lambda s: s.describe([GOOD], [0, 1, 2]), "3 coda slots, there is room for 2"),
        (lambda s: s.decode([GOOD], depth=5), r"depth 5 is outside 1 … 4"),
        (lambda s: s.run("recurrent", 1, "consume"), r"no plan for recurrent/1/consume"),
        (lambda s: s.decode([GOOD._replace(mode=Mode.CONSUME)]), r"no plan for recurrent/1/consume \(mode_not_built\)"),
    ],
)
def test_calls_that_cannot_be_served(call: Callable[[Steps], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(worker().steps)


def test_a_prompt_chunk_and_its_sampling_are_described_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = worker().memory
    written: list[Pool] = []
    write = memory.write

    def noted(pool: Pool, offset: int, data: NDArray[np.generic]) -> None:
        written.append(pool)
        write(pool, offset, data)

    monkeypatch.setattr(memory, "write", noted)
    rows = [RowInput(slot, 7 + slot, slot, 0, 0 if slot == 0 else -1) for slot in range(3)]
    one = worker().steps.prefill(rows, [2], logits=True)
    assert written == [Pool.IO]
    worker().steps.prefill(rows[:2])
    assert written == [Pool.IO] * 2
    again = worker().steps.prefill([], [2, 1, 0], logits=True)
    assert written == [Pool.IO] * 4  # more slots than the largest bucket: two parts
    assert one.logits is not None
    assert again.logits is not None
    assert np.allclose(one.logits[0], again.logits[0], atol=1e-5)  # another bucket, another order of sums


def test_a_row_that_decodes_past_its_context_touches_nothing() -> None:
    """Its next block would be the first entry of the next request's block table."""
    steps, memory = worker().steps, worker().memory
    last = steps.geometry.max_context - 1
    steps.describe([RowInput(1, 3, 0, 1, 2)])
    steps.decode([RowInput(0, 5, last, 0, 1)])
    assert steps.state("row_state")[0, columns.Row.POSITION] == last + 1
    before = [memory.read(pool, 0, memory.size(pool)) for pool in (Pool.KV, Pool.STATE)]
    for row in (RowInput(0), RowInput(0, block=3)):
        steps.decode([row])
        after = [memory.read(pool, 0, memory.size(pool)) for pool in (Pool.KV, Pool.STATE)]
        assert all(map(np.array_equal, before, after))


def prompt(request: int, *tokens: int) -> list[RowInput]:
    """A prompt's rows, in the first of the request's two blocks; the last row in the slot where it decodes."""
    last = len(tokens) - 1
    slots = [request if i == last else 2 + i for i in range(len(tokens))]
    return [
        RowInput(s, t, i, request, 2 * request if i == 0 else -1) for i, (s, t) in enumerate(zip(slots, tokens, strict=True))
    ]


def test_steps_may_be_submitted_before_earlier_ones_are_read() -> None:
    steps, rows = worker().steps, [RowInput(0)]
    steps.prefill(prompt(0, 7, 8, 9), [0])
    one_by_one = [steps.decode(rows, logits=True) for _ in range(3)]
    first = steps.submit_prefill(prompt(0, 7, 8, 9), [0])
    ahead = [steps.submit_decode(rows, logits=True) for _ in range(3)]
    assert first.result().tokens.shape == (1,)
    for submitted, want in reversed(list(zip(ahead, one_by_one, strict=True))):
        for got in (submitted.result(), submitted.result()):
            assert got.tokens.tolist() == want.tokens.tolist()
            assert got.logits is not None
            assert want.logits is not None
            assert np.array_equal(got.logits, want.logits)
    assert len({step.logits.tobytes() for step in one_by_one if step.logits is not None}) == len(one_by_one)


def test_nothing_is_waited_for_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, waited = worker().memory, []
    read_later = memory.read_later

    class Noted:
        def __init__(self, *where: Any) -> None:
            self._pending = read_later(*where)

        def result(self) -> NDArray[np.uint8]:
            waited.append(self)
            return self._pending.result()

    monkeypatch.setattr(memory, "read_later", Noted)
    submitted = [worker().steps.submit_prefill(prompt(0, 7, 8), [0], logits=True)]
    submitted += [worker().steps.submit_decode([RowInput(0)], depth=2) for _ in range(2)]
    assert waited == []
    submitted[1].result()
    assert len(waited) == 1
    submitted[0].result()
    assert len(waited) == 3


def test_a_step_of_single_programs_is_decode() -> None:
    steps = worker().steps
    steps.prefill(prompt(0, 7, 8), [0])
    steps.prefill(prompt(1, 9), [1])
    want = steps.decode([RowInput(0), RowInput(1)], logits=True)
    steps.prefill(prompt(0, 7, 8), [0])
    steps.prefill(prompt(1, 9), [1])
    steps.describe([RowInput(0), RowInput(1)], [0, 1])
    for program in ("prelude", *["recurrent"] * steps.model.loops, "coda", "sample", "advance"):
        steps.run(program, 2)
    got = steps.collect(2, logits=True)
    assert got.logits is not None
    assert want.logits is not None
    assert got.tokens.tolist() == want.tokens.tolist()
    assert np.array_equal(got.logits, want.logits)
    alone = steps.collect(1)
    assert (alone.tokens.tolist(), alone.logits) == (want.tokens[:1].tolist(), None)


def test_more_rows_than_the_largest_bucket_are_collected_in_order() -> None:
    steps = worker().steps
    chunk = prompt(0, 7, 8, 9)
    steps.prefill(chunk)
    slots = [row.slot for row in chunk]
    every = steps.coda(slots)
    assert every.shape == (3, steps.model.vocab_size)
    for at, slot in enumerate(slots):
        assert np.allclose(steps.coda([slot])[0], every[at], atol=1e-5)
    assert steps.submit_decode([]).result().tokens.tolist() == []
    assert steps.coda([]).shape == (0, steps.model.vocab_size)


def test_plans_without_the_hosts_buffers_are_refused() -> None:
    model, geometry = worker().steps.model, worker().steps.geometry
    buffers = {b.name: b for b in worker().preparation.targets[0].index.buffers}
    counter = CoverageCounter()
    for name in ("coda_batch", "batch", "inputs", "logits", "tokens"):
        lost = {n: b for n, b in buffers.items() if n != name}
        small = buffers | {name: msgspec.structs.replace(buffers[name], shape=(1, *buffers[name].shape[1:]))}
        for wrong in (lost, small):
            with pytest.raises(ArtifactError, match=f"buffer {name} of shape"):
                Steps(model, geometry, wrong, worker().memory, Dispatcher((), counter, None, {}), counter)


def test_decode_steps_that_ran_are_counted_by_shape_and_prompts_are_not() -> None:
    worker().coverage.clear()
    steps = worker().steps
    steps.prefill([*prompt(0, 4, 9)], [0])
    for depth in (None, 2, 2):
        steps.decode([RowInput(0)], depth=depth)
    steps.decode([RowInput(slot) for slot in range(3)])
    steps.decode([])
    with pytest.raises(RequestError, match="no plan"):
        steps.decode([RowInput(0, mode=Mode.CONSUME)])
    found = [(s.mode, s.rows, s.loops, s.count) for s in worker().coverage.record().steps]
    assert found == [("dense", 1, 2, 2), ("dense", 1, 4, 1), ("dense", 3, 4, 1)]
