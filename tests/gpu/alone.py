"""Tests that need the device, or the machine's attention, to themselves."""

from __future__ import annotations

import os

import pytest

ALONE = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="other tests of this run would be in its way: run it without -n"
)
