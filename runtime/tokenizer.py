"""The artifact's tokenizer, read before the worker is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.reader import TOKENIZER, Artifact

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(artifact: Artifact) -> Tokenizer | None:
    """The artifact's tokenizer, if it has one. Raises ArtifactError if the library cannot read it."""
    raw = artifact.tokenizer()
    if raw is None:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises plain exceptions
        hint = "Install a newer version of the package tokenizers, or build the artifact again."
        raise ArtifactError(f"cannot be read: {error}", where=TOKENIZER, hint=hint) from error
