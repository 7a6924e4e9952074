"""Keeps the repository's root off `sys.path`: there its folders would shadow packages called `kernels`, `runtime`, …"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [p for p in sys.path if p not in ("", ".", _ROOT)]
