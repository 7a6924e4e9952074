"""Images compiled once for all tests of a run."""

from __future__ import annotations

import pytest

from ouro_build.builder.cache import ImageCache


@pytest.fixture(scope="session")
def image_cache(tmp_path_factory: pytest.TempPathFactory) -> ImageCache:
    return ImageCache(tmp_path_factory.getbasetemp() / "images")
