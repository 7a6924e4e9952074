"""Tables given to a build: which are taken, what they shape, and how an entry that cannot be is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from ouro_build.artifacts.columns import decode
from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.errors import CompileError, UsageError
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.tuning import Entry, Residency, TuningTable, encode_table
from ouro_build.builder.cache import Image
from ouro_build.builder.cli import cli
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.record import residency_key, takes_residency
from ouro_build.builder.spec import BuildSpec
from ouro_build.builder.tuned import check_image, check_tables, read_tables, spilled_shapes
from ouro_build.kernels.candidates import configuration
from ouro_build.kernels.sites import attention_site
from ouro_build.kernels.tuning import shipped
from tests.artifact_maker import base_manifest, weights_record
from tests.unit.artifacts.test_tuning import SHAPE, TABLE

H200 = find_part("h200")
# The projection that follows attention in preset:tiny, and a shape that it does not have.
MINE = Entry(kernel="linear_few", bits=16, rows=1, sizes=(64, 64), parameters=SHAPE)
STRAY = Entry(kernel="linear_few", bits=16, rows=1, sizes=(64, 65), parameters=SHAPE)
GIVEN = TuningTable(name="given", arch="sm_90", source="a test", entries=(MINE, STRAY))
IMAGE = Image(cubin=b"", function="linear_few", registers=64, spills=0, shared=1024, parameters=())


def spec(*tables: TuningTable, parts: tuple[str, ...] = ("h200",)) -> BuildSpec:
    return BuildSpec("preset:tiny", tuple(map(find_part, parts)), (1,), (16,), max_context=64, tuning=tables)


def test_an_entry_shapes_its_images_and_the_rest_is_noted() -> None:
    (target,) = prepare(spec(GIVEN)).targets
    (plain,) = prepare(spec()).targets
    (chosen,) = target.chosen
    assert target.chosen[chosen] == MINE
    constants = dict(chosen.constants)
    assert (constants["ROWS"], constants["N"], constants["K"], constants["K_WARPS"]) == (1, 64, 64, SHAPE.warps)
    assert chosen not in plain.index.specializations
    images, before = ({s.compiled() for s in t.index.specializations} for t in (target, plain))
    assert images - {chosen.compiled()} <= before
    (note,) = target.notes
    assert note.startswith("1 of the 2 entries of table 'given' shape nothing: ")
    assert [(r.name, r.match) for r in target.tuning] == [("given", "exact"), ("sm_90", "exact")]
    assert target.tuning[0].digest == GIVEN.digest
    assert (plain.chosen, plain.notes) == ({}, ())
    assert target.part == plain.part == H200
    assert type(target.part) is type(H200)


def test_what_is_asked_for_reaches_its_launches_and_the_rest_is_noted() -> None:
    def asked(kernel: str, rows: int = 1, kind: str = "", bits: Literal[16, 32] = 16) -> Residency:
        return Residency(kernel=kernel, bits=bits, rows=rows, kind=kind, shared=3072)

    def built(*residency: Residency) -> tuple[set[int], list[str]]:
        (target,) = prepare(spec(msgspec.structs.replace(GIVEN, entries=(), residency=residency))).targets
        shared = {s.options.shared for s in target.index.specializations}
        return shared, [note.partition(":")[0] for note in target.notes]

    (plain,) = prepare(spec()).targets
    plans = [p for p in decode(plain.index, plain.columns) if takes_residency(p.key) and p.key.bucket == 1]
    keys = sorted({residency_key(launch) for plan in plans for launch in plan.launches})
    every = [asked(kernel, kind=kind) for kernel, kind in keys]
    stray = (asked("residual_norm", rows=2), asked("linear_few"), asked("silu_mul"), asked("rms_norm", bits=32))
    assert len(plans) == 2
    assert built(*every) == ({0, 3072}, [])
    assert built(*every, *stray) == ({0, 3072}, [f"4 of the {len(every) + 4} residencies of table 'given' hold for no launch"])
    lacking = [r for r in every if r.kernel != "resolve"]
    said = [
        "table 'given' has no residency of resolve for 1 rows",
        f"{len(lacking)} of the {len(lacking)} residencies of table 'given' hold for no launch",
    ]
    assert built(*lacking) == ({0}, said), "all launches of a loop, or none"


def test_more_shared_memory_than_a_block_may_have_is_refused() -> None:
    residency = (Residency(kernel="residual_norm", bits=16, rows=1, shared=100 << 10),)
    wide, narrow = find_part("h200"), find_part("sm_120")
    check_tables([msgspec.structs.replace(GIVEN, residency=residency)], [wide])
    where = (
        r"--tuning: table 'given', residency of residual_norm, 16 bits, 1 rows: a block is to have 102400 bytes of shared mem"
    )
    with pytest.raises(UsageError, match=where):
        check_tables([msgspec.structs.replace(GIVEN, arch="sm_120", residency=residency)], [narrow])


def test_entries_of_several_buckets_that_come_to_one_image_are_all_used() -> None:
    site = attention_site("attention_decode", 1, 4, 4, 16, "bfloat16")
    entries = tuple(
        Entry(kernel=site.kernel, bits=16, rows=rows, sizes=site.sizes, parameters=configuration(H200, site)) for rows in (1, 2)
    )
    both = replace(spec(), buckets=(1, 2), tuning=(msgspec.structs.replace(GIVEN, entries=entries),))
    (target,) = prepare(both).targets
    assert (len({specialization.compiled() for specialization in target.chosen}), target.notes) == (1, ())


def test_other_parts_keep_the_shipped_tables() -> None:
    here, there = prepare(spec(GIVEN, parts=("h200", "dgx-spark"))).targets
    assert len(here.chosen) == 1
    assert there.chosen == {}
    assert [(r.name, r.match) for r in there.tuning] == [("sm_120", "nearest")]


def test_tables_that_fit_no_part_or_are_too_many() -> None:
    with pytest.raises(UsageError, match="table 'given' is for sm_90, and no --gpu is"):
        check_tables((GIVEN,), (find_part("b200"),))
    with pytest.raises(UsageError, match="'made-up' is the second for sm_90"):
        spec(GIVEN, TABLE)


def test_what_an_entry_needs_is_held_against_the_part() -> None:
    (target,) = prepare(spec(GIVEN)).targets
    (chosen,) = target.chosen
    check_image(H200, chosen, msgspec.structs.replace(IMAGE, spills=8), target.chosen)
    large = msgspec.structs.replace(IMAGE, shared=300 << 10)
    with pytest.raises(CompileError, match="bytes of shared memory") as caught:
        check_image(H200, chosen, large, target.chosen)
    assert caught.value.where == "--tuning: entry 'linear_few, 16 bits, 64 × 64, 1 rows'"
    assert "Tune on sm_90 again" in caught.value.hint
    with pytest.raises(CompileError, match="bytes of shared memory") as caught:
        check_image(H200, chosen, large, {})
    assert caught.value.where.startswith("kernel linear_few")


def test_what_spills_with_the_triton_that_is_there_is_said() -> None:
    (target,) = prepare(spec()).targets
    shapes = target.index.specializations
    record = base_manifest(("h200",), weights_record()).targets[0]
    images = {s: msgspec.structs.replace(record.images[0], spills=0) for s in shapes}

    def said(**chosen: Entry) -> tuple[str, ...]:
        made = msgspec.structs.replace(record, images=tuple(images[s] for s in shapes))
        return spilled_shapes(made, shapes, "3.6.0", {s: e for s in shapes for k, e in chosen.items() if s.kernel == k})

    assert said() == ()
    for s in shapes:
        if s.kernel in ("embedding", "linear_few"):  # of which no table knows the first
            images[s] = msgspec.structs.replace(images[s], spills=8 + s.options.num_warps)
    (sentence,) = said()
    widest = max(s.options.num_warps for s in shapes if s.kernel == "linear_few")
    assert sentence.startswith(
        f"on h200 these spill registers, which makes them slower: linear_few ({8 + widest} bytes a thread). "
    )
    assert "Triton 3.6.0" in sentence
    (sentence,) = said(linear_few=MINE)
    assert (
        f"slower: entry 'linear_few, 16 bits, 64 × 64, 1 rows' ({8 + widest} bytes a thread). They are of --tuning." in sentence
    )


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(UsageError, match=r"--tuning .*t\.json: cannot be read: No such file"):
        read_tables([path])
    path.write_bytes(encode_table(GIVEN))
    (table,) = read_tables([path])
    assert table.digest == read_tables([path])[0].digest
    path.write_bytes(
        encode_table(msgspec.structs.replace(GIVEN, residency=(Residency(kernel="linear_fewer", bits=16, rows=1),)))
    )
    with pytest.raises(UsageError, match=r"t\.json: residency\[0\]: there is no kernel 'linear_fewer'"):
        read_tables([path])
    path.write_bytes(encode_table(GIVEN)[:-4])
    with pytest.raises(UsageError, match=r"(?s)--tuning .*t\.json: not valid JSON.*Write it with ouro-artifact tune"):
        read_tables([path])


def test_the_command_says_what_is_left_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(encode_table(GIVEN))
    line = ["--model", "preset:tiny", "--gpu", "h200", "--buckets", "1,2", "--max-context", "64", "--dry-run", "-o"]
    assert exit_code(cli, [*line, str(tmp_path / "a.ouro"), "--tuning", str(path), "--json"]) == 0
    assert "1 of the 2 entries of table 'given'" in capsys.readouterr().err
    assert exit_code(cli, [*line, str(tmp_path / "a.ouro"), "--tuning", str(tmp_path / "none.json")]) == 2
    path.write_bytes(encode_table(shipped(find_part("b200"))))
    assert exit_code(cli, [*line, str(tmp_path / "a.ouro"), "--tuning", str(path)]) == 2
    assert "is for sm_100" in capsys.readouterr().err
