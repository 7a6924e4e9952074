"""The host's account of sparse rows: what each does in its next loop, and by which right it uses its reference slot.

Modes and loops live in the rows' states on the device, where nobody may read them back during a step. What the host writes
there and submits decides them, so it can follow them here: for rows that are not dense or have a reference slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ouro_build.artifacts.errors import RequestError
from ouro_build.artifacts.rows import SOURCE_LOOP, Mode
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.references import Lease, ReferencePool, SlotState

DENSE, CAPTURE, CONSUME, MIXED = "dense", "capture", "consume", "mixed"
NO_CAPTURE = "no_capture"
"""The variant of `mixed` in which no row captures."""


@dataclass
class _Row:
    """A row that is not dense in every loop, or that has a reference slot, by `lease`.

    `captured`: a loop of its present token has captured; what the slot holds otherwise is of an earlier one, or nothing.
    """

    mode: Mode
    loop: int = 0
    lease: Lease | None = None
    captured: bool = False

    def begin_token(self) -> None:
        """It is to run its loops from the first."""
        self.loop, self.captured = 0, False

    @property
    def role(self) -> str:
        """What it does in its next loop where its mode decides."""
        if self.mode is Mode.DENSE:
            return DENSE
        if self.mode is Mode.CONSUME or self.loop > SOURCE_LOOP:
            return CONSUME
        return CAPTURE if self.loop == SOURCE_LOOP else DENSE


class RowModes:
    """Follows rows of up to `loops` loops. `pool` is None where rows remember nothing, as when all keys are retained."""

    def __init__(self, loops: int, pool: ReferencePool | None) -> None:
        self._loops = loops
        self._pool = pool
        self._rows: dict[int, _Row] = {}
        self._batch: Sequence[int] = ()
        self._coda: Sequence[int] = ()
        self._inputs: Sequence[tuple[RowInput, Lease | None]] = ()
        self._captures: Sequence[tuple[_Row, Lease]] = ()
        self._consumes: Sequence[Lease] = ()

    def check(self, rows: Iterable[RowInput]) -> None:
        """Raise RequestError for a row that names a reference slot by a generation that is not in force."""
        for at, row in enumerate(rows):
            try:
                self._lease(row)
            except RequestError as error:
                raise RequestError(error.what, where=f"row {at}", hint=error.hint) from error

    def describe(self, rows: Sequence[RowInput], coda: Sequence[int]) -> None:
        """`rows`, which `check` let pass, are the batch from now on, and `coda` the slots to sample for."""
        self._batch, self._coda = [row.slot for row in rows], coda
        given = [row for row in rows if row.mode >= 0 or row.reference_slot >= 0 or row.slot in self._rows]
        self._inputs = [(row, self._lease(row)) for row in given]

    def describe_coda(self, coda: Sequence[int]) -> None:
        """`coda` are the slots to sample for, in the same batch."""
        self._coda = coda

    def next_loop(self, bucket: int) -> tuple[str, str]:
        """Mode and variant of the `recurrent` that runs the next loop of the first `bucket` rows of the batch."""
        live = [slot for slot in self._batch[:bucket] if slot >= 0]
        rows = [self._rows.get(slot) for slot in live]
        roles = {DENSE if row is None else row.role for row in rows if row is None or row.loop < self._loops}
        if len(roles) <= 1:
            return (roles.pop() if roles else DENSE), ""
        return MIXED, "" if CAPTURE in roles else NO_CAPTURE

    def begin_loop(self, bucket: int, mode: str, variant: str) -> tuple[int, ...]:
        """`recurrent` of this mode is about to be submitted: the reference slots into which it captures. `ran` notes it.

        Raises RequestError for a row that consumes what it may not: its lease is stale, it has none, or it captured nothing for
        its present token (a row in Mode.CONSUME takes whatever the slot holds, if anything); and for rows that capture into one
        slot, or where the variant says that none does.
        """
        self._captures = self._consumes = ()
        if self._pool is None or mode == DENSE:
            return ()
        captures, consumes = [], []
        for slot in self._batch[:bucket]:
            row = self._rows.get(slot)
            role = _role(row, mode, self._loops) if slot >= 0 else DENSE
            if role == CONSUME:
                consumes.append(self._readable(slot, row))
            elif role == CAPTURE and variant == NO_CAPTURE:
                hint = "Run the variant with capture, or `run_loop`, which chooses."
                raise RequestError(f"the row of slot {slot} captures in this loop", where=f"{mode}/{variant}", hint=hint)
            elif role == CAPTURE and row is not None and row.lease is not None:
                self._pool.state(row.lease)
                captures.append((row, row.lease))
        slots = tuple(lease.slot for _, lease in captures)
        if len(set(slots)) != len(slots):
            raise RequestError(f"two rows capture into one reference slot: {list(slots)}")
        self._captures, self._consumes = captures, consumes
        return slots

    def ran(self, program: str, bucket: int) -> None:
        """`program` was submitted for the first `bucket` rows of the batch, or of the coda slots."""
        if program == "prelude":
            for given, lease in self._inputs:
                self._start(given, lease)
        elif program in ("recurrent", "prefill") and self._rows:
            if program == "recurrent":
                self._note_uses()
            for row in self._known(self._batch[:bucket]):
                row.loop += row.loop < self._loops
        elif program == "advance" and self._rows:
            for row in self._known(self._coda[:bucket]):
                row.begin_token()

    def _note_uses(self) -> None:
        if self._pool is None:
            return
        for row, lease in self._captures:
            self._pool.capture(lease)
            row.captured = True
        for lease in self._consumes:
            self._pool.consume(lease)

    def _known(self, slots: Iterable[int]) -> list[_Row]:
        return [self._rows[slot] for slot in slots if slot in self._rows]

    def _start(self, given: RowInput, lease: Lease | None) -> None:
        """What `bind` does: columns that are not -1 replace the state's, and the row enters loop 0; anew it is dense."""
        row = self._rows.get(given.slot, _Row(Mode.DENSE))
        row.begin_token()
        if given.mode >= 0 or given.position >= 0:
            row.mode = Mode(max(given.mode, Mode.DENSE))
        if given.reference_slot >= 0:
            row.lease = lease
        if row.mode is Mode.DENSE and row.lease is None:
            self._rows.pop(given.slot, None)
        else:
            self._rows[given.slot] = row

    def _lease(self, row: RowInput) -> Lease | None:
        if self._pool is None or row.reference_slot < 0 or row.reference_slot == self._pool.padding:
            return None
        return self._pool.check(row.reference_slot, row.generation)

    def _readable(self, slot: int, row: _Row | None) -> Lease:
        if self._pool is None or row is None or row.lease is None:
            hint = "Bind one (Steps.references.bind), give it with the row's mode, and run the source loop in mode capture."
            raise RequestError(f"the row of slot {slot} has no reference slot to consume", hint=hint)
        if self._pool.state(row.lease) is SlotState.EMPTY:
            hint = "Run the row's source loop in mode capture first."
            raise RequestError(f"the row of slot {slot} has captured nothing yet", hint=hint)
        if row.mode is not Mode.CONSUME and not row.captured:
            what = f"the row of slot {slot} has captured nothing for its present token, its reference is an earlier one's"
            raise RequestError(what, hint="Run its source loop in mode capture, or with `run_loop`, which chooses.")
        return row.lease


def _role(row: _Row | None, mode: str, loops: int) -> str:
    """What a row does in a program of `mode`: what the mode is called, or with `mixed` what its own mode decides."""
    if row is not None and row.loop >= loops:
        return DENSE  # inactive: it runs no loop
    if mode != MIXED:
        return mode
    return DENSE if row is None else row.role
