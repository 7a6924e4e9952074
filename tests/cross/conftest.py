"""Images compiled once for all tests of a run, whatever process of the run they are in."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ouro_build.builder.cache import ImageCache

MakeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the processes of a run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def make_once(run_folder: Path) -> MakeOnce:
    """`make_once(name, make)`: the shared folder that `make` fills in the first process that needs it."""

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder = run_folder / name
        with open(run_folder / f"{name}.lock", "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            if not lock.read():
                folder.mkdir(exist_ok=True)
                make(folder)
                lock.write("made")
        return folder

    return once


@pytest.fixture(scope="session")
def image_cache(run_folder: Path) -> ImageCache:
    return ImageCache(run_folder / "images")
