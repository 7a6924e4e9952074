"""Tuning tables as files: what is read, what is refused and why."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.records import DeviceRecord
from ouro_build.artifacts.tuning import (
    Entry,
    Fragments,
    Measured,
    Residency,
    Splits,
    TuningTable,
    decode_table,
    encode_table,
)

SHAPE = Fragments(block_n=16, warps=8, step=64, ahead=6, x_ahead=6, maxnreg=168)
SPLITS = Splits(tile_bytes=16384, warps=8, programs=2, longest=64, shortest=1, stages=3, maxnreg=128)
TABLE = TuningTable(
    name="made-up",
    arch="sm_90",
    source="a test",
    device=DeviceRecord(name="NVIDIA H200", capability=(9, 0), sm_count=132, memory=1 << 37, cuda=(13, 0)),
    toolchain=(("triton", "3.9.0"),),
    context=1024,
    entries=(
        Entry(
            kernel="linear_few", bits=16, rows=8, sizes=(2048, 5632), parameters=SHAPE,
            measured=Measured(before_us=900.5, us=880.25, launches=96),
        ),
        Entry(kernel="attention_decode", bits=16, rows=0, kind="single", parameters=SPLITS),
    ),
)  # fmt: skip


def edited(**changes: Any) -> bytes:
    """The table's file with fields changed; `entry` changes those of the first entry, `parameters` its parameters."""
    value = json.loads(encode_table(TABLE))
    (first,) = (e for e in value["entries"] if e["kernel"] == "linear_few")
    first["parameters"] |= changes.pop("parameters", {})
    first |= changes.pop("entry", {})
    return json.dumps(value | changes).encode()


def test_round_trip_in_a_fixed_order() -> None:
    raw = encode_table(TABLE)
    again = decode_table(raw, "t")
    assert set(again.entries) == set(TABLE.entries)
    assert [e.kernel for e in again.entries] == ["attention_decode", "linear_few"]
    assert encode_table(again) == raw
    assert encode_table(msgspec.structs.replace(TABLE, entries=TABLE.entries[::-1])) == raw
    assert len(raw.splitlines()) == 1 + len(TABLE.entries) + 1


def test_the_digest_is_of_the_values_not_of_the_layout() -> None:
    table = decode_table(encode_table(TABLE), "t")
    assert decode_table(json.dumps(json.loads(encode_table(TABLE)), indent=3).encode(), "t").digest == table.digest
    assert msgspec.structs.replace(table, context=1).digest != table.digest


def test_a_table_without_carveouts_is_what_it_was() -> None:
    """Its file and its digest are those of a table from before there were any."""
    raw = encode_table(TABLE)
    assert b"carveout" not in raw
    assert decode_table(raw, "t").entries[0].parameters == SPLITS
    assert (SHAPE.carveout, SPLITS.carveout) == (-1, -1)


def test_carveouts_are_values_of_a_table() -> None:
    shapes = (msgspec.structs.replace(SHAPE, carveout=0), msgspec.structs.replace(SPLITS, carveout=100))
    entries = tuple(msgspec.structs.replace(e, parameters=p) for e, p in zip(TABLE.entries, shapes, strict=True))
    table = msgspec.structs.replace(TABLE, entries=entries)
    assert set(decode_table(encode_table(table), "t").entries) == set(entries)
    assert table.digest != TABLE.digest


RESIDENCY = (
    Residency(kernel="residual_norm", bits=16, rows=1, carveout=0, shared=6144),
    Residency(kernel="linear_few", bits=16, rows=8, kind="deep", shared=32768),
    Residency(kernel="linear_few", bits=16, rows=8, kind="narrow", carveout=30),
)


def test_residency_is_of_a_table_that_has_it_and_changes_nothing_of_others() -> None:
    table = msgspec.structs.replace(TABLE, residency=RESIDENCY)
    raw = encode_table(table)
    assert decode_table(raw, "t") == msgspec.structs.replace(table, entries=decode_table(raw, "t").entries)
    assert encode_table(msgspec.structs.replace(table, residency=RESIDENCY[::-1])) == raw
    assert len(raw.splitlines()) == len(encode_table(TABLE).splitlines()) + len(RESIDENCY) + 1
    assert b"residency" not in encode_table(TABLE)
    assert table.digest != TABLE.digest


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({}, r"residency\[1\] is the second for residual_norm, 16 bits, 1 rows"),
        ({"kind": "deep"}, "residual_norm has no kinds, and kind is 'deep'"),
        ({"kernel": "linear_few", "kind": "single"}, "kind 'single' is not one of middle"),
        ({"shared": (227 << 10) + 1}, r"residency\[1\]\.shared"),
        ({"carveout": 101}, r"residency\[1\]\.carveout"),
        ({"rows": 0}, r"residency\[1\]\.rows"),
        ({"stages": 2}, "unknown field `stages`"),
    ],
)
def test_residency_that_cannot_be(second: dict[str, Any], text: str) -> None:
    value = json.loads(encode_table(msgspec.structs.replace(TABLE, residency=RESIDENCY[:1])))
    value["residency"].append(value["residency"][0] | second)
    with pytest.raises(UsageError, match=text):
        decode_table(json.dumps(value).encode(), "t")


def test_a_table_without_entries() -> None:
    empty = msgspec.structs.replace(TABLE, entries=())
    assert decode_table(encode_table(empty), "t") == empty


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "an object is expected"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"name": "a", "name": "b"}', "repeated"),
        (b" " * ((16 << 20) + 1), "at most"),
        (edited(more=1), "unknown field `more`"),
        (edited(schema="ouro-tuning/2"), r"\$\.schema"),
        (edited(arch="sm_70"), "'sm_70' is not one of"),
        (edited(name=""), r"\$\.name"),
        (edited(name="/home/me/table"), r"\$\.name"),
        (edited(context=-1), r"\$\.context"),
        (edited(entries=None), r"\$\.entries"),
        (edited(entry={"kernel": "matmul"}), "kernel 'matmul' is not one of"),
        (edited(entry={"kernel": "linear_many"}), "does not take parameters of this form"),
        (edited(entry={"kernel": "attention_decode"}), "does not take parameters of this form"),
        (edited(entry={"kind": "deep"}), "sizes or a kind, and not both"),
        (edited(entry={"sizes": []}), "sizes or a kind, and not both"),
        (edited(entry={"sizes": [], "kind": "wide"}), "kind 'wide' is not one of"),
        (edited(entry={"sizes": [2048]}), "1 sizes, a shape of linear_few has 2"),
        (edited(entry={"sizes": [2048, 0]}), r"\$\.entries\[1\]\.sizes"),
        (edited(entry={"rows": 0}), "with sizes is for a number of rows"),
        (edited(entry={"bits": 32}), "linear_few has fragments of 16 bits alone"),
        (edited(entry={"bits": 8}), r"\$\.entries\[1\]\.bits"),
        (edited(entry={"measured": {"before_us": 1.0, "us": 0, "launches": 1}}), r"measured\.us"),
        (edited(parameters={"form": "other"}), "form"),
        (edited(parameters={"block_n": 24}), "block_n is 24, no power of two"),
        (edited(parameters={"block_n": 1 << 20}), r"parameters\.block_n"),
        (edited(parameters={"warps": True}), r"parameters\.warps"),
        (edited(parameters={"warps": 3}), "warps is 3, no power of two"),
        (edited(parameters={"maxnreg": 256}), r"parameters\.maxnreg"),
        (edited(parameters={"carveout": 101}), r"parameters\.carveout"),
        (edited(parameters={"carveout": -2}), r"parameters\.carveout"),
        (edited(parameters={"ahead": 0}), r"parameters\.ahead"),
        (edited(parameters={"step": 10**30}), r"parameters"),
        (edited(parameters={"more": 1}), "unknown field `more`"),
    ],
)
def test_what_is_not_right_is_named(raw: bytes, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        decode_table(raw, "--tuning t.json")
    assert caught.value.where == "--tuning t.json"


def test_two_entries_for_one_place() -> None:
    value = json.loads(encode_table(TABLE))
    value["entries"].append(value["entries"][0])
    with pytest.raises(UsageError, match=r"entries\[2\] is the second for attention_decode"):
        decode_table(json.dumps(value).encode(), "t")


def test_splits_that_contradict_themselves() -> None:
    with pytest.raises(ValueError, match="more than longest"):
        msgspec.structs.replace(SPLITS, shortest=65)


@given(st.data())
def test_no_damage_is_anything_but_a_usage_error(data: st.DataObject) -> None:
    raw = bytearray(encode_table(TABLE))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UsageError):
        decode_table(bytes(raw), "t")
