"""Row inputs, states and batches: launches over them, random ones, and what they mean in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from ouro_build.artifacts.plan import Launch
from ouro_build.artifacts.rows import RECORD, InputColumn, Row
from ouro_build.kernels.advance import advance
from ouro_build.kernels.bind import bind
from ouro_build.kernels.resolve import resolve
from tests.kernel_cases import PART, ints
from tests.kernel_harness import buffer

Records = list[list[int]]
Lists = dict[str, Any]
Run = Callable[[Launch, dict[str, Tensor]], None]
"""`run_source` or `run_reference` of the harness."""
REQUESTS, TABLE_WIDTH, BLOCK_SIZE, LOOPS = 3, 5, 4, 4
POSITIONS = TABLE_WIDTH * BLOCK_SIZE
KEPT = ("TOKEN", "MODE", "REFERENCE_SLOT", "GENERATION", "POSITION", "REQUEST")
"""Columns of a row input that replace the slot's."""


@dataclass(frozen=True)
class Scene:
    """The state of every slot, row inputs for some, a batch of some, and their tokens. Lists are longer than `bucket`."""

    bucket: int
    state: Records
    tables: Records
    inputs: Records
    batch: list[int]
    tokens: list[int]


def applies(states: Records, given: list[int]) -> bool:
    """Whether a row input names a slot that is active or becomes so."""
    slot = given[InputColumn.SLOT]
    return slot >= 0 and (states[slot][Row.LOOP] >= 0 or given[InputColumn.POSITION] >= 0)


def entry_of(states: Records, given: list[int]) -> tuple[int, int] | None:
    """The block table entry that a row input may set: none where it does not apply, or the tables end before it."""
    if not applies(states, given):
        return None
    pairs = ((InputColumn.REQUEST, Row.REQUEST), (InputColumn.POSITION, Row.POSITION))
    request, position = (given[i] if given[i] >= 0 else states[given[InputColumn.SLOT]][s] for i, s in pairs)
    return (request, position // BLOCK_SIZE) if 0 <= request < REQUESTS and 0 <= position < POSITIONS else None


def scene(random: Random, slots: int) -> Scene:
    """Slots are inactive or active, some at positions and for requests that no table has; inputs name distinct slots."""

    def kept(top: int = 99) -> int:
        return random.choice((-1, random.randint(0, top)))

    def any_position() -> int:
        outside = random.choice((-2, -1, POSITIONS, POSITIONS + 1, 2**31 - 1))
        return random.choice((random.randrange(POSITIONS), outside))

    def any_request() -> int:
        return random.randint(-1, REQUESTS)

    def state(slot: int) -> list[int]:
        if random.random() < 0.4:
            return [-1] * RECORD
        values = {Row.SLOT: slot, Row.LOOP: random.randint(0, LOOPS), Row.REQUEST: any_request()}
        values[Row.POSITION] = any_position()
        return [values.get(column, random.randint(0, 99)) for column in Row]

    def given(slot: int) -> list[int]:
        values = {InputColumn.SLOT: slot, InputColumn.POSITION: any_position(), InputColumn.REQUEST: any_request()}
        return [values[column] if column in values else kept() for column in InputColumn]

    states = [state(slot) for slot in range(slots)]
    inputs = [given(slot) if random.random() < 0.7 else [-1] * RECORD for slot in random.sample(range(slots), slots)]
    # Rows may share an entry of a block table; then they must agree on it.
    entries: dict[tuple[int, int], int] = {}
    for record in inputs:
        entry = entry_of(states, record)
        if entry is not None:
            record[InputColumn.BLOCK] = entries.setdefault(entry, record[InputColumn.BLOCK])
    return Scene(
        bucket=random.randint(1, slots),
        state=states,
        tables=[[kept() for _ in range(TABLE_WIDTH)] for _ in range(REQUESTS)],
        inputs=inputs,
        batch=[random.choice((slot, slot, -1)) for slot in random.sample(range(slots), slots)],
        tokens=[random.randint(0, 99) for _ in range(slots)],
    )


SCENES = st.builds(scene, st.randoms(use_true_random=False), st.integers(1, 6))
LIMITS = st.tuples(st.integers(1, LOOPS + 1), st.integers(1, POSITIONS))
"""Limits of loops and of positions for `resolve`."""
LARGE_SCENE = replace(scene(Random(0), 70), bucket=67)
"""More rows than one program of `bind` takes, and none of them the last of a program."""


def bound(scene: Scene) -> tuple[Records, Records]:
    """(state, tables) after `bind`."""
    state, tables = [list(r) for r in scene.state], [list(r) for r in scene.tables]
    for given in scene.inputs[: scene.bucket]:
        if not applies(scene.state, given):
            continue
        entry, slot = entry_of(scene.state, given), given[InputColumn.SLOT]
        for name in KEPT:
            if given[InputColumn[name]] >= 0:
                state[slot][Row[name]] = given[InputColumn[name]]
        state[slot][Row.SLOT], state[slot][Row.LOOP] = slot, 0
        if entry is not None and given[InputColumn.BLOCK] >= 0:
            tables[entry[0]][entry[1]] = given[InputColumn.BLOCK]
    return state, tables


def resolved(scene: Scene, loop_limit: int, position_limit: int = POSITIONS) -> Records:
    """The rows after `resolve`."""

    def record(slot: int) -> list[int]:
        state = scene.state[slot]
        live = slot >= 0 and 0 <= state[Row.LOOP] < loop_limit and 0 <= state[Row.POSITION] < position_limit
        return list(state) if live else [-1] * RECORD

    return [record(slot) for slot in scene.batch[: scene.bucket]]


def advanced(scene: Scene) -> Records:
    """The state after `advance` of the rows that `resolve` makes."""
    state = [list(r) for r in scene.state]
    for row, token in zip(resolved(scene, LOOPS + 1), scene.tokens, strict=False):
        if row[Row.SLOT] >= 0:
            mine = state[row[Row.SLOT]]
            mine[Row.TOKEN], mine[Row.POSITION], mine[Row.LOOP] = token, row[Row.POSITION] + 1, 0
    return state


def bind_launch(scene: Scene) -> Launch:
    return bind(
        PART,
        bucket=scene.bucket,
        inputs=buffer("inputs", "int32", len(scene.inputs), RECORD),
        row_state=buffer("row_state", "int32", len(scene.state), RECORD),
        block_tables=buffer("block_tables", "int32", REQUESTS, TABLE_WIDTH),
        block_size=BLOCK_SIZE,
    )


def resolve_launch(scene: Scene, loop_limit: int, position_limit: int = POSITIONS) -> Launch:
    return resolve(
        PART,
        batch=buffer("batch", "int32", len(scene.batch)),
        row_state=buffer("row_state", "int32", len(scene.state), RECORD),
        rows=buffer("rows", "int32", scene.bucket, RECORD),
        loop_limit=loop_limit,
        position_limit=position_limit,
    )


def advance_launch(scene: Scene) -> Launch:
    return advance(
        PART,
        rows=buffer("rows", "int32", scene.bucket, RECORD),
        tokens=buffer("tokens", "int32", len(scene.tokens)),
        row_state=buffer("row_state", "int32", len(scene.state), RECORD),
    )


def check_bind(scene: Scene, run: Run, device: str = "cpu") -> None:
    """`run` must do to `scene` what `bound` says."""
    state, tables = bound(scene)
    before = {"inputs": scene.inputs, "row_state": scene.state, "block_tables": scene.tables}
    after = {"inputs": scene.inputs, "row_state": state, "block_tables": tables}
    _check(bind_launch(scene), run, device, before, after)


def check_resolve(scene: Scene, limits: tuple[int, int], run: Run, device: str = "cpu") -> None:
    """`run` must do to `scene` what `resolved` says with `limits` (of loops, of positions)."""
    read = {"batch": scene.batch, "row_state": scene.state}
    before, after = {**read, "rows": [[77] * RECORD] * scene.bucket}, {**read, "rows": resolved(scene, *limits)}
    _check(resolve_launch(scene, *limits), run, device, before, after)


def check_advance(scene: Scene, run: Run, device: str = "cpu") -> None:
    """`run` must do to `scene` what `advanced` says."""
    read = {"rows": resolved(scene, LOOPS + 1), "tokens": scene.tokens}
    before, after = {**read, "row_state": scene.state}, {**read, "row_state": advanced(scene)}
    _check(advance_launch(scene), run, device, before, after)


def _check(launch: Launch, run: Run, device: str, before: Lists, after: Lists) -> None:
    tensors = {name: ints(device, value) for name, value in before.items()}
    run(launch, tensors)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == after
