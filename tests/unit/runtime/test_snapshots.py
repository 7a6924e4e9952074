"""Snapshots see every byte, and which lines of a buffer are otherwise; by torch or without it."""

from __future__ import annotations

import numpy as np
import pytest

from ouro_build.artifacts.plan import Buffer, LoadTimeValue, Pool
from ouro_build.runtime import snapshots
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.snapshots import HostSnapshot, Snapshot, TorchSnapshot

SIZES = {Pool.KV: 6400, Pool.STATE: 301, Pool.WORKSPACE: 64, Pool.IO: 0}
WIDE = Buffer("wide", Pool.KV, "float32", (2, LoadTimeValue.KV_BLOCKS, 16), 0)
PART = Buffer("part", Pool.STATE, "int32", (3, 8), 100)


@pytest.fixture(params=[64, 100, 1 << 20])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """Compared in pieces of several sizes."""
    monkeypatch.setattr(snapshots, "_PIECE", request.param)
    monkeypatch.setattr(snapshots, "_CHUNK", request.param)
    made = HostMemory(SIZES)
    for pool in (Pool.KV, Pool.STATE):
        made.fill(pool, 1)
    return made


def flip(memory: HostMemory, pool: Pool, at: int) -> None:
    memory.arena(pool)[at] ^= 0x80


@pytest.mark.parametrize("kind", [HostSnapshot, TorchSnapshot])
def test_a_bit_anywhere_is_seen(memory: HostMemory, kind: type[HostSnapshot | TorchSnapshot]) -> None:
    snapshot: Snapshot = kind(memory)
    snapshot.take()
    assert snapshot.same()
    for pool, at in ((Pool.KV, 0), (Pool.KV, 6399), (Pool.STATE, 99), (Pool.STATE, 300)):
        flip(memory, pool, at)
        assert not snapshot.same()
        flip(memory, pool, at)
        assert snapshot.same()
    flip(memory, Pool.WORKSPACE, 3)
    assert snapshot.same(), "nothing outlives a program there"
    flip(memory, Pool.STATE, 5)
    snapshot.take()
    assert snapshot.same()


def test_lines_that_differ_are_named_and_read(memory: HostMemory) -> None:
    snapshot = TorchSnapshot(memory)
    snapshot.take()
    for at in (0, 64 * 7 + 63, 64 * 8, 6399):
        flip(memory, Pool.KV, at)
    which = snapshot.differing(WIDE)
    assert which.nonzero().squeeze(1).tolist() == [0, 7, 8, 99]
    kept, now, parts = snapshot.lines(WIDE, which)
    assert parts.tolist() == [0, 0, 0, 1], "keys and values have a part for each plane"
    assert kept.shape == now.shape == (4, 64)
    assert (kept == 1).all()
    assert np.argwhere(now != kept).tolist() == [[0, 0], [1, 63], [2, 0], [3, 63]]
    assert not snapshot.differing(PART).any()
    flip(memory, Pool.STATE, 99)
    flip(memory, Pool.STATE, 196)
    assert not snapshot.differing(PART).any(), "beside the buffer"
    flip(memory, Pool.STATE, 163)
    assert snapshot.differing(PART).tolist() == [False, True, False]
    assert snapshot.lines(PART, snapshot.differing(PART))[2].tolist() == [0]
