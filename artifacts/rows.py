"""The int32 records through which the host and the programs speak of rows.

A row is one (request, position, loop) query. The host describes a batch in records of `InputColumn` columns; `resolve`
turns a batch's slot ids into `ROW` records, which every later kernel of the program reads. A record whose slot
is negative is an inactive row: nothing that outlives a program is read or written for it.

These columns are part of the artifact's format: compiled kernels have them built in.
"""

from __future__ import annotations

from enum import IntEnum

RECORD = 8
"""int32 values a record; 32 bytes, so that one record is one aligned load."""


class InputColumn(IntEnum):
    """Columns of a host row record. -1 in a column other than `SLOT` keeps what the slot's state holds."""

    SLOT = 0
    TOKEN = 1
    POSITION = 2  # >= 0 also makes the slot active
    REQUEST = 3
    BLOCK = 4  # KV block to enter in the request's block table at this position
    MODE = 5
    REFERENCE_SLOT = 6
    GENERATION = 7


class Row(IntEnum):
    """Columns of a resolved row record."""

    SLOT = 0  # -1: inactive
    POSITION = 1
    LOOP = 2
    REQUEST = 3
    MODE = 4
    REFERENCE_SLOT = 5
    GENERATION = 6
    TOKEN = 7


SOURCE_LOOP = 1
"""The loop whose attention sparse rows remember: dense before it, sparse after it."""


class Mode(IntEnum):
    """What a row does in a `mixed` program; -1 in a state is DENSE. A program of one mode does not read it."""

    DENSE = 0  # dense in every loop
    CAPTURE = 1  # dense before SOURCE_LOOP, captures there, consumes in later loops
    CONSUME = 2  # consumes in every loop what its reference slot holds, of whichever token it was captured


class ReferenceRecord(IntEnum):
    """Columns of the int32 record of a reference slot's layer, through which readers find out whether it holds anything."""

    GENERATION = 0  # of the binding that captured
    COUNT = 1  # retained keys of every head; 0 or less: nothing
