"""The training folder is no package of ours: its modules are found by its own path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "training"))
