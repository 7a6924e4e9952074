"""Where a worker's weights come from: the artifact, or what it is given instead."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError, UsageError
from ouro_build.artifacts.manifest import WEIGHTS
from ouro_build.artifacts.packed_file import PackedFile
from ouro_build.artifacts.reader import Artifact
from ouro_build.runtime.chunk_hashes import ChunkHashes
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.upload import FileUpload
from ouro_build.runtime.weights_file import WeightsFile


def embedded_weights(artifact: Artifact) -> PackedFile:
    """The artifact's own weights file, mapped."""
    return PackedFile(artifact.path / WEIGHTS, artifact.manifest.model, ArtifactError)


def begin_upload(
    artifact: Artifact, loading: Loading, clock: StartupClock, parent: str, hashes: ChunkHashes | None = None
) -> FileUpload | None:
    """The artifact's own weights, being checked from now on, or only read; None if others are to be loaded.

    `hashes` are taken over if they are of this very file. What is done is timed beside the phase `parent`.
    """
    weights, check = loading.weights, loading.check_weights
    if weights is not None or not artifact.manifest.weights.embedded:
        return None
    path = artifact.path / WEIGHTS
    if hashes is not None and not os.path.samestat(os.fstat(hashes.descriptor), path.stat()):
        hashes.close()
        hashes = None
    record, began = artifact.manifest.weights.file, time.monotonic()
    name = "check weights" if check else "read weights"
    file = WeightsFile(
        path,
        embedded_weights(artifact).data_start,
        record,
        check=check,
        hashes=hashes,
        done=lambda: clock.was_beside(name, parent, began, record.bytes),
    )
    return FileUpload(file, clock, parent)


def weight_pieces(artifact: Artifact, weights: str | None, check: bool) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(offset in the weights pool, bytes) of the weights that `weights` names; `check`: compared with the artifact's digests.

    Raises UsageError if the artifact has no weights and none are named, CheckpointError if they are not the artifact's.
    """
    from ouro_build.artifacts.weight_source import open_weights  # a worker with weights of its own should not load these
    from ouro_build.artifacts.weight_stream import check_layout, load_packed

    manifest = artifact.manifest
    if weights is None:
        raise UsageError(
            "the artifact holds digests of its weights, not the weights",
            where="--weights",
            hint="Name them: --weights DIR|FILE|preset:NAME, or put them in with `ouro-artifact embed`.",
        )
    check_layout(manifest.weights, manifest.model)
    source = open_weights(weights, manifest.model, manifest.source.seed)
    return load_packed(source, manifest.model, manifest.weights if check else None)
