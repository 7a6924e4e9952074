"""These tests compile kernels and run them on a CUDA device; without one each is skipped, saying why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def _obstacle() -> str:
    """Why no test here can run; empty if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1: the interpreter can't share a process with compiled kernels"
    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where it cannot run."""
    mine = [item for item in items if _HERE in item.path.parents]
    obstacle = _obstacle() if mine else ""
    if obstacle:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=obstacle))
