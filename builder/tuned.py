"""Tables that a build is given: read, held against its parts, and followed to the images that they shaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ouro_build.artifacts.errors import CompileError, UsageError
from ouro_build.artifacts.manifest import TargetRecord
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Plan, ProgramKey, Specialization
from ouro_build.artifacts.tuning import FORMS, Entry, TuningTable, decode_table
from ouro_build.builder.cache import Image
from ouro_build.builder.limits import check_limits
from ouro_build.builder.record import residency_key
from ouro_build.kernels.registry import NAMES
from ouro_build.kernels.sites import site_of
from ouro_build.kernels.tuning import Tuning

_FLAG = "--tuning"

Chosen = Mapping[Specialization, Entry]
"""The entries that gave specialisations their shape."""
Shaped = tuple[Specialization, Entry]
"""A specialisation, and an entry that gave it its shape."""


def read_tables(paths: Iterable[Path]) -> tuple[TuningTable, ...]:
    """The tables in files. Raises UsageError for one that cannot be read or is not right in every field."""
    tables = []
    for path in paths:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror}", where=f"{_FLAG} {path}") from error
        table = decode_table(raw, f"{_FLAG} {path}")
        for at, asked in enumerate(table.residency):
            if asked.kernel not in NAMES:
                hint = f"Take it out: the kernels are {', '.join(NAMES)}."
                raise UsageError(f"there is no kernel {asked.kernel!r}", where=f"{_FLAG} {path}: residency[{at}]", hint=hint)
        tables.append(table)
    return tuple(tables)


def check_tables(tables: Sequence[TuningTable], parts: Sequence[Part]) -> None:
    """Raise UsageError for a table whose architecture none of `parts` has, or another table has too, and for one that asks for
    more shared memory than a block may have there."""
    wanted = {part.arch for part in parts}
    seen: set[str] = set()
    for table in tables:
        if table.arch not in wanted:
            hint = f"Tune on {' or '.join(sorted(wanted))}, or leave it out: shipped tables serve every GPU."
            raise UsageError(f"table {table.name!r} is for {table.arch}, and no --gpu is", where=_FLAG, hint=hint)
        if table.arch in seen:
            raise UsageError(f"table {table.name!r} is the second for {table.arch}", where=_FLAG, hint="Give one of them.")
        seen.add(table.arch)
        most = min(part.shared for part in parts if part.arch == table.arch)
        if wrong := next((r for r in table.residency if r.shared > most), None):
            what = f"a block is to have {wrong.shared} bytes of shared memory, and {table.arch} has {most}"
            hint = f"Tune on {table.arch} again, or take it out of the table."
            raise UsageError(what, where=f"{_FLAG}: table {table.name!r}, residency of {wrong.place}", hint=hint)


def shaped(plans: Iterable[Plan], tuning: Tuning) -> tuple[Shaped, ...]:
    """What launch rules that asked `tuning` were told in `plans`; several entries may come to one specialisation."""
    launches = [(launch.specialization, site_of(launch)) for plan in plans for launch in plan.launches]
    found = ((specialization, tuning.find(site)) for specialization, site in launches if site is not None)
    return tuple((specialization, entry) for specialization, entry in found if entry is not None)


def chosen_entries(found: Iterable[Shaped], tables: Sequence[TuningTable]) -> dict[Specialization, Entry]:
    """What entries of `tables` shaped."""
    given = {entry for table in tables for entry in table.entries}
    return {specialization: entry for specialization, entry in found if entry in given}


def unused_entries(found: Iterable[Shaped], tables: Sequence[TuningTable]) -> tuple[str, ...]:
    """A sentence for every table some of whose entries shaped nothing: such an entry is no error."""
    used = {entry for _, entry in found}
    counts = [(t.name, len(t.entries), sum(e not in used for e in t.entries)) for t in tables]
    said = "{} of the {} entries of table {} shape nothing: this build lacks their shapes or rows, or others come first"
    return tuple(said.format(left, every, repr(name)) for name, every, left in counts if left)


def unused_residency(plans: Sequence[Plan], tables: Sequence[TuningTable], bits: int) -> tuple[str, ...]:
    """Sentences on what tables ask for loops that take none of it, as some of their launches have none, and on tables that ask
    something of launches that `plans` of a model of `bits` bits do not have."""
    loops, heads = (
        {p.key.bucket: {residency_key(x) for x in p.launches} for p in plans if p.key == ProgramKey(program, p.key.bucket)}
        for program in ("recurrent", "coda")
    )
    said = []
    for table in tables:
        used = 0
        for rows, loop in loops.items():
            mine = {(r.kernel, r.kind) for r in table.residency if (r.bits, r.rows) == (bits, rows)}
            if loop <= mine:
                used += len(mine & (loop | heads[rows]))
            elif loop & mine:
                lacking = ", ".join(f"{kernel} {kind}".rstrip() for kernel, kind in sorted(loop - mine))
                said.append(f"table {table.name!r} has no residency of {lacking} for {rows} rows: dense loops take none there")
        if left := len(table.residency) - used:
            what = f"{left} of the {len(table.residency)} residencies of table {table.name!r} hold for no launch"
            said.append(f"{what}: this build lacks their kernels, kinds or rows, or has elements of other bits, or takes none")
    return tuple(said)


def check_image(part: Part, specialization: Specialization, image: Image, chosen: Chosen) -> None:
    """Raise CompileError if `image` is over a limit of `part`, naming the entry of a given table that shaped it, if one did."""
    try:
        check_limits(part, specialization, image)
    except CompileError as error:
        entry = chosen.get(specialization)
        if entry is None:
            raise
        raise entry_error(entry, part.arch, error.what) from error


def spilled_shapes(
    target: TargetRecord, specializations: Sequence[Specialization], triton: str, chosen: Chosen
) -> tuple[str, ...]:
    """Sentences on what spills in `target`, whose images are one a specialisation: by `chosen` entries of given tables, and by
    shapes that come with ouro-build, which were chosen for a Triton that needs fewer registers than version `triton`."""
    given: dict[str, int] = {}
    own: dict[str, int] = {}
    for specialization, image in zip(specializations, target.images, strict=True):
        if image.spills and specialization.kernel in FORMS:
            entry = chosen.get(specialization)
            name, worst = (specialization.kernel, own) if entry is None else (f"entry {entry.place!r}", given)
            worst[name] = max(image.spills, worst.get(name, 0))
    said = f"on {target.part.name} these spill registers, which makes them slower: {{}}. "
    newer = (
        f"Triton {triton} needs more than the one that their shapes were chosen with: build with a newer one, or find other "
    )
    return (
        *((said.format(_sizes(given)) + f"They are of {_FLAG}.",) if given else ()),
        *((said.format(_sizes(own)) + newer + "shapes with ouro-artifact tune.",) if own else ()),
    )


def _sizes(worst: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({size} bytes a thread)" for name, size in sorted(worst.items()))


def entry_error(entry: Entry, arch: str, what: str) -> CompileError:
    """That an entry of a given table cannot be used on `arch`, and why."""
    hint = f"Tune on {arch} again, or take the entry out of the table."
    return CompileError(what, where=f"{_FLAG}: entry {entry.place!r}", hint=hint)
