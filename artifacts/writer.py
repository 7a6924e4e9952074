"""Writes the files of an artifact into a folder, the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from ouro_build.artifacts.checks import check_manifest
from ouro_build.artifacts.columns import Columns, PlanIndex
from ouro_build.artifacts.digests import digest_files
from ouro_build.artifacts.manifest import MANIFEST, FileRecord, Manifest, encode_manifest, sealed
from ouro_build.artifacts.plan_checks import check_graphs, check_plans

Content = bytes | Path | Callable[[BinaryIO], None] | FileRecord
"""What a file is made of: its bytes, a file to copy, a function that writes it, or the record of a file already there."""


def plan_paths(part: str) -> tuple[str, str]:
    """Paths of the plan index and the plan columns of the target for `part`."""
    return f"plans/{part}.json", f"plans/{part}.bin"


def encode_plan_index(index: PlanIndex) -> bytes:
    """Canonical bytes."""
    return msgspec.json.encode(index, order="sorted")


def plan_files(manifest: Manifest, plans: Mapping[str, tuple[PlanIndex, Columns]]) -> dict[str, Content]:
    """The plan files of every target, from its plans by part name. Raises ArtifactError if plans and manifest disagree."""
    files: dict[str, Content] = {}
    for target in manifest.targets:
        index, columns = plans[target.part.name]
        check_plans(manifest, target, index)
        check_graphs(index, columns, target.plan_index)
        files[target.plan_index] = encode_plan_index(index)
        files[target.plan_columns] = columns.to_bytes()
    return files


def write_artifact(folder: Path, manifest: Manifest, files: Mapping[str, Content], workers: int | None = None) -> Manifest:
    """Write `files`, by their paths in the artifact, and the manifest, whose `files` and `seal` are filled in here.

    Returns the manifest as written. Raises ArtifactError if a reader would refuse it, OSError if a file cannot be written.
    """
    there = {path: content for path, content in files.items() if isinstance(content, FileRecord)}
    for path, content in files.items():
        if not isinstance(content, FileRecord):
            _write(folder / path, content)
    records = (*there.values(), *digest_files(folder, files.keys() - there.keys(), workers))
    complete = sealed(msgspec.structs.replace(manifest, files=tuple(sorted(records, key=lambda r: r.path))))
    check_manifest(complete)
    (folder / MANIFEST).write_bytes(encode_manifest(complete))
    return complete


def _write(path: Path, content: bytes | Path | Callable[[BinaryIO], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        if isinstance(content, bytes):
            file.write(content)
        elif isinstance(content, Path):
            _copy(content, file)
        else:
            content(file)


def _copy(source: Path, target: BinaryIO) -> None:
    with source.open("rb") as file:
        while piece := file.read(1 << 20):
            target.write(piece)
