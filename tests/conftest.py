"""For every test: an import path without the repository's root, and no time limit on a single example."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# At the root our folders would shadow packages called `kernels`, `runtime`, …
_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [p for p in sys.path if p not in ("", ".", _ROOT)]

# A busy machine is no failure.
settings.register_profile("ouro", deadline=None)
settings.load_profile("ouro")
