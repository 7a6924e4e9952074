"""Puts the weights into an artifact that only names them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ouro_build.artifacts.errors import ArtifactError, CheckpointError, UsageError
from ouro_build.artifacts.manifest import WEIGHTS, Manifest, WeightsRecord
from ouro_build.artifacts.publish import publishing
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.weight_source import OTHER_WEIGHTS, open_weights
from ouro_build.artifacts.weight_stream import check_layout, write_weights
from ouro_build.artifacts.writer import Content, write_artifact


def embed(artifact: Artifact, weights: str, output: Path, *, force: bool = False) -> Manifest:
    """Publish as `output` what a build with embedded weights would have written, byte for byte. Returns its manifest.

    `weights` is what `--weights` takes. Raises UsageError if the artifact has its weights, CheckpointError if these are
    not the weights that it was built for, OutputError if `output` cannot be written.
    """
    manifest = artifact.manifest
    if manifest.weights.embedded:
        raise UsageError("the artifact holds its weights already", where=str(artifact.path))
    check_layout(manifest.weights, manifest.model)
    source = open_weights(weights, manifest.model, manifest.source.seed)

    files: dict[str, Content] = {f.path: artifact.path / f.path for f in manifest.files}
    files[WEIGHTS] = manifest.weights.file
    embedded = msgspec.structs.replace(manifest, weights=msgspec.structs.replace(manifest.weights, embedded=True))
    with publishing(output, force=force) as folder:
        with (folder / WEIGHTS).open("xb") as out:
            _check_same(write_weights(source, manifest.model, out), manifest.weights, source.label)
        complete = write_artifact(folder, embedded, files)
        if [f for f in complete.files if f.path != WEIGHTS] != list(manifest.files):
            raise ArtifactError("a file changed while it was copied", where=str(artifact.path))
    return complete


def _check_same(found: WeightsRecord, expected: WeightsRecord, label: str) -> None:
    pairs = zip(found.tensors, expected.tensors, strict=True)
    wrong = [b.name for a, b in pairs if a.sha256 != b.sha256]
    if wrong:
        more = f" and {len(wrong) - 1} other tensors" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{wrong[0]}{more} differ from the weights the artifact was built for",
            where=f"--weights {label}",
            hint=OTHER_WEIGHTS,
        )
    if found.file != expected.file:
        raise ArtifactError("the weights file described there cannot be made from these tensors", where="weights.file")
