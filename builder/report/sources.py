"""What a report is made of: an artifact and what was observed of it, and records of a live worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.fit import fit_known_parts
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.records import CoverageRecord, ObservedRecord, StartupRecord
from ouro_build.builder.fit_view import KnownPart, known_parts
from ouro_build.builder.inspect import ArtifactView
from ouro_build.builder.inspect import view as inspect
from ouro_build.builder.record_files import read_any, read_record


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report shows; `ouro-artifact report --json` prints it. None and empty are what was not given."""

    name: str
    artifact: ArtifactView | None
    fit: tuple[KnownPart, ...]
    observed: tuple[ObservedRecord, ...]
    startup: StartupRecord | None
    coverage: CoverageRecord | None
    startup_before: StartupRecord | None
    coverage_before: CoverageRecord | None
    notes: tuple[str, ...]


class Found(msgspec.Struct):
    """Records found beside an artifact, and what is to be said of them."""

    observed: list[ObservedRecord] = []
    startup: StartupRecord | None = None
    coverage: CoverageRecord | None = None
    notes: list[str] = []


def gather(
    artifact: Artifact | None, record: Path | None, startup: Path | None, coverage: Path | None, against: Sequence[Path]
) -> Report:
    """Read and check all that a report is to show.

    Beside `artifact`, in its observed folder or `record`, lie records of warm-ups and perhaps of workers; `startup` and
    `coverage` name others. `against` are older ones to compare those with. Raises UsageError, and ArtifactError for
    damaged plans.
    """
    found = Found() if artifact is None else _beside(artifact, record)
    if startup is not None:
        found.startup = read_record(startup, StartupRecord)
    if coverage is not None:
        found.coverage = read_record(coverage, CoverageRecord)
    if artifact is None and found.startup is None and found.coverage is None:
        hint = "Give ART, --startup S.json or --coverage C.json."
        raise UsageError("there is nothing to report on", where="ouro-artifact report", hint=hint)
    startup_before, coverage_before = _earlier(against, found)
    return Report(
        name="a worker" if artifact is None else artifact.path.name,
        artifact=None if artifact is None else inspect(artifact),
        fit=() if artifact is None else known_parts(fit_known_parts(artifact.manifest)),
        observed=tuple(found.observed),
        startup=found.startup,
        coverage=found.coverage,
        startup_before=startup_before,
        coverage_before=coverage_before,
        notes=tuple(found.notes),
    )


def _beside(artifact: Artifact, record: Path | None) -> Found:
    folder, found = record or artifact.observed_path, Found()
    if record is not None and not record.is_dir():
        raise UsageError("not a folder", where=f"--record {record}")
    for path in sorted(folder.glob("*.json")):
        read = read_any(path)
        if isinstance(read, StartupRecord):
            found.startup = read
        elif isinstance(read, CoverageRecord):
            found.coverage = read
        elif isinstance(read, ObservedRecord) and read.identity == artifact.identity:
            found.observed.append(read)
        elif isinstance(read, ObservedRecord):
            found.notes.append(f"{path.name} is about another artifact, {read.identity[:12]}…: left out")
    return found


def _earlier(against: Sequence[Path], found: Found) -> tuple[StartupRecord | None, CoverageRecord | None]:
    startup: StartupRecord | None = None
    coverage: CoverageRecord | None = None
    for path in against:
        read = read_any(path)
        if isinstance(read, StartupRecord) and found.startup is not None and startup is None:
            startup = read
        elif isinstance(read, CoverageRecord) and found.coverage is not None and coverage is None:
            coverage = read
        else:
            hint = "An older start-up record goes with --startup, an older coverage record with --coverage; one of each."
            raise UsageError("there is nothing that it can be compared with", where=f"--against {path}", hint=hint)
    return startup, coverage
