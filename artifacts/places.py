"""Where results may be put."""

from __future__ import annotations

from pathlib import Path

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.manifest import MANIFEST

_PLANS = "plans"


def check_outside(output: Path, where: str) -> None:
    """Raise UsageError, naming `where`, if `output` is to lie in an artifact: a file that its manifest does not list, or lists
    with another digest, damages it."""
    for folder in output.resolve().parents:
        if (folder / MANIFEST).is_file() and (folder / _PLANS).is_dir():
            what = f"lies in the artifact {folder}, which would be damaged"
            raise UsageError(what, where=where, hint="Choose a place beside it.")
