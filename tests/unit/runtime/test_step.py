"""What a caller's own scheduler may hand over: what nothing has is refused before the device sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from ouro_build.artifacts import rows as columns
from ouro_build.artifacts.errors import ArtifactError, RequestError
from ouro_build.artifacts.plan import Pool
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
    ("column", "limit"), [("slot", 2 + 4), ("token", 512), ("position", 32), ("request", 2), ("block", 2 * 2)]
)
def test_values_that_nothing_has_never_reach_the_device(column: str, limit: int) -> None:
    for value in (limit, -2, 2**31, 2**40):
        worker().memory.fill(Pool.IO, 0xA5)
        before = io()
        with pytest.raises(RequestError, match=f"row 1: {column} is {value}, below {limit} expected"):
            worker().steps.start([GOOD, RowInput(**{**RowInput(1)._asdict(), column: value})])
        assert np.array_equal(io(), before)
    worker().steps.start([RowInput(**{**GOOD._asdict(), column: limit - 1})])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.start([GOOD, GOOD]), "two rows name one state slot"),
        (lambda s: s.start([RowInput(i) for i in range(5)]), "5 rows, there is room for 4"),
        (lambda s: s.prefill_loop(5), "5 rows, the largest bucket of prefill is 4"),
        (lambda s: s.coda([6]), "slot 6, below 6 expected"),
        (lambda s: s.start([GOOD], [0, 1, 2]), "3 coda slots, there is room for 2"),
        (lambda s: s.decode([GOOD], depth=5), r"depth 5 is outside 1 … 4"),
        (lambda s: s.decode([GOOD], mode="consume"), r"no plan for recurrent/1/consume"),
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
    steps.start([RowInput(1, 3, 0, 1, 2)])
    steps.decode([RowInput(0, 5, last, 0, 1)])
    assert steps.state("row_state")[0, columns.Row.POSITION] == last + 1
    before = [memory.read(pool, 0, memory.size(pool)) for pool in (Pool.KV, Pool.STATE)]
    for row in (RowInput(0), RowInput(0, block=3)):
        steps.decode([row])
        after = [memory.read(pool, 0, memory.size(pool)) for pool in (Pool.KV, Pool.STATE)]
        assert all(map(np.array_equal, before, after))


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
