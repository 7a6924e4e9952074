"""Opens an artifact: nothing is believed before it is checked, and nothing is returned that was not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.checks import check_manifest
from ouro_build.artifacts.columns import Columns, PlanIndex, columns_from_bytes
from ouro_build.artifacts.digests import COPY_AGAIN, check_bytes, verify_files, verify_sizes
from ouro_build.artifacts.errors import ArtifactError, UsageError, VersionError
from ouro_build.artifacts.manifest import (
    MANIFEST,
    ORACLE,
    WEIGHTS,
    FileRecord,
    Manifest,
    TargetRecord,
    check_readable,
    decode_manifest,
    identity,
)
from ouro_build.artifacts.oracle import Oracle, decode_oracle
from ouro_build.artifacts.plan_checks import check_arguments, check_graphs, check_plans
from ouro_build.artifacts.retention import RETENTION, counts_from_bytes

TOKENIZER = "tokenizer/tokenizer.json"
Verify = Literal["full", "all_but_weights", "sizes"]


@dataclass(frozen=True)
class Artifact:
    """An artifact on disk. What its methods return has been checked against the manifest when it was read."""

    path: Path
    manifest: Manifest
    identity: str

    def read(self, path: str) -> bytes:
        """The file at `path` (as the manifest spells it). Raises ArtifactError if it is not what the manifest says."""
        record = next((f for f in self.manifest.files if f.path == path), None)
        if record is None:
            raise ArtifactError("the artifact has no such file", where=path)
        return _read(self.path, record)

    def plans(self, target: TargetRecord) -> tuple[PlanIndex, Columns]:
        """The plans of `target`. Raises ArtifactError if any index or offset in them is out of range."""
        raw, numbers = self.read(target.plan_index), self.read(target.plan_columns)
        with self._newer(target.plan_index):
            index = _decode_index(raw, target.plan_index)
            check_plans(self.manifest, target, index)
            columns = columns_from_bytes(index, numbers, target.plan_columns)
            check_arguments(index, columns, target.plan_columns)
            check_graphs(index, columns, target.plan_index)
        return index, columns

    def oracle(self) -> Oracle:
        """The recorded prompt and answer. Raises ArtifactError if there is none."""
        raw = self.read(ORACLE)
        with self._newer(ORACLE):
            return decode_oracle(raw, self.manifest.model.vocab_size)

    @contextmanager
    def _newer(self, where: str) -> Iterator[None]:
        """What cannot be read of an artifact of a newer format, whose bytes are right, is no damage."""
        try:
            yield
        except ArtifactError as error:
            check_readable(self.manifest, error, where)
            raise

    def has(self, path: str) -> bool:
        """Whether the artifact holds a file of this path."""
        return any(f.path == path for f in self.manifest.files)

    def tokenizer(self) -> bytes | None:
        """`tokenizer.json`, if the model came with a tokenizer."""
        return self.read(TOKENIZER) if self.has(TOKENIZER) else None

    def retained_counts(self) -> NDArray[np.int32]:
        """Retained keys by the number of keys, int32 [max_context + 1], where rows remember any (`geometry.references`).

        Raises ArtifactError if the table is not as long as the context, or retains more than a slot has room for.
        """
        geometry = self.manifest.geometry
        return counts_from_bytes(self.read(RETENTION), geometry.max_context, geometry.key_capacity)

    @property
    def observed_path(self) -> Path:
        """The folder beside the artifact for what is observed of it on devices."""
        return self.path.with_name(self.path.name + ".observed")

    def verify(self, workers: int | None = None) -> None:
        """Check every byte, and read all that is read strictly. Raises ArtifactError naming file and field."""
        verify_files(self.path, self.manifest.files, workers)
        for target in self.manifest.targets:
            self.plans(target)
        if self.manifest.geometry.references:
            self.retained_counts()
        if self.has(ORACLE):
            self.oracle()


def open_artifact(path: Path, verify: Verify = "full", workers: int | None = None) -> Artifact:
    """Open the artifact at `path`.

    `full` checks every byte on `workers` threads (default: one a core). `all_but_weights` leaves out the weights alone: who
    streams them checks them on the way. `sizes` checks the manifest, the names and sizes of all files, and leaves each file's
    digest until it is read.

    Raises UsageError if there is nothing at `path`, VersionError for another format or packing, ArtifactError for any damage.
    """
    if not path.exists():
        raise UsageError("no such artifact", where=str(path))
    try:
        return _open(path.resolve(), verify, workers)
    except ArtifactError as error:
        raise ArtifactError(error.what, where=_inside(path, error.where), hint=error.hint or COPY_AGAIN) from error
    except VersionError as error:
        raise VersionError(error.what, where=_inside(path, error.where), hint=error.hint) from error


def _open(path: Path, verify: Verify, workers: int | None) -> Artifact:
    raw = _read_manifest(path)
    manifest = decode_manifest(raw)
    check_manifest(manifest)
    _check_listing(path, manifest)
    artifact = Artifact(path, manifest, identity(raw))
    if verify == "full":
        artifact.verify(workers)
        return artifact
    verify_sizes(path, manifest.files)
    if verify == "all_but_weights":
        verify_files(path, [f for f in manifest.files if f.path != WEIGHTS], workers)
    return artifact


def _inside(path: Path, where: str) -> str:
    return f"{path}: {where}" if where else str(path)


MOST_MANIFEST = 64 << 20
"""Bytes of a manifest at most: it is read whole. Those of thousands of images have some megabytes."""


def _read_manifest(path: Path) -> bytes:
    if not path.is_dir():
        raise ArtifactError("not a folder: an artifact is one")
    try:
        # Asked before it is opened: a pipe would be waited for, and a link leads out of the artifact.
        if not stat.S_ISREG((path / MANIFEST).lstat().st_mode):
            raise ArtifactError("not an ordinary file", where=MANIFEST)
        with (path / MANIFEST).open("rb") as file:
            raw = file.read(MOST_MANIFEST + 1)
    except FileNotFoundError as error:
        raise ArtifactError("missing: this is no artifact, or an incomplete one", where=MANIFEST) from error
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=MANIFEST) from error
    if len(raw) > MOST_MANIFEST:
        raise ArtifactError(f"more than {MOST_MANIFEST} bytes: no manifest is so long", where=MANIFEST)
    return raw


def _read(root: Path, record: FileRecord) -> bytes:
    try:
        data = (root / record.path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror}", where=record.path, hint=COPY_AGAIN) from error
    check_bytes(record, data)
    return data


def _decode_index(raw: bytes, where: str) -> PlanIndex:
    try:
        index = msgspec.json.decode(raw, type=PlanIndex)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ArtifactError(str(error), where=where) from error
    if msgspec.json.encode(index, order="sorted") != raw:
        raise ArtifactError("not in canonical form: a key is repeated or a value is spelt otherwise", where=where)
    return index


def _check_listing(root: Path, manifest: Manifest) -> None:
    """The folder holds exactly the listed files, as ordinary files, and the folders that they need."""
    listed = {f.path for f in manifest.files}
    folders = {str(parent) for path in listed for parent in PurePosixPath(path).parents}
    found = set()
    for path, kind in _walk(root, ""):
        if kind == "other":
            raise ArtifactError("a symbolic link or special file, which no artifact holds", where=path)
        if path not in (folders if kind == "folder" else listed | {MANIFEST}):
            raise ArtifactError(f"unexpected {kind}: the manifest does not list it", where=path)
        found.add(path)
    missing = sorted(listed - found)
    if missing:
        raise ArtifactError("missing", where=missing[0])


def _walk(root: Path, prefix: str) -> Iterator[tuple[str, Literal["file", "folder", "other"]]]:
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield path, "folder"
                yield from _walk(root / entry.name, path + "/")
            else:
                yield path, "file" if entry.is_file(follow_symlinks=False) else "other"
