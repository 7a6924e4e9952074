"""Where a worker's weights come from: the artifact, or what it is given instead."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError, UsageError
from ouro_build.artifacts.manifest import WEIGHTS
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.weight_source import PackedFile, open_weights
from ouro_build.artifacts.weight_stream import load_packed


def embedded_weights(artifact: Artifact) -> PackedFile:
    """The artifact's own weights file, mapped."""
    return PackedFile(artifact.path / WEIGHTS, artifact.manifest.model, ArtifactError)


def weight_pieces(artifact: Artifact, weights: str | None) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(offset in the weights pool, bytes) of the weights that `weights` names, checked against the artifact's digests.

    Raises UsageError if the artifact has no weights and none are named, CheckpointError if they are not the artifact's.
    """
    manifest = artifact.manifest
    if weights is None:
        raise UsageError(
            "the artifact holds digests of its weights, not the weights",
            where="--weights",
            hint="Name them: --weights DIR|FILE|preset:NAME, or put them in with `ouro-artifact embed`.",
        )
    return load_packed(open_weights(weights, manifest.model, manifest.source.seed), manifest.model, manifest.weights)
