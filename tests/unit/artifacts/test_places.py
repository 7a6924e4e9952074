from pathlib import Path

import pytest

from ouro_build.artifacts import reader
from ouro_build.artifacts.errors import ArtifactError, UsageError
from ouro_build.artifacts.places import check_outside
from ouro_build.artifacts.publish import check_output
from tests.artifact_maker import make_artifact


def test_nothing_is_put_into_an_artifact(tmp_path: Path) -> None:
    art = make_artifact(tmp_path / "a.ouro")
    (tmp_path / "link").symlink_to(art)
    for inside in (art / "x.json", art / "manifest.json", art / "plans" / "x", tmp_path / "link" / "x.json"):
        with pytest.raises(UsageError, match=r"lies in the artifact .*a\.ouro"):
            check_outside(inside, "-o")
    with pytest.raises(UsageError, match="lies in the artifact"):
        check_output(art / "inner.ouro", force=False)
    check_outside(tmp_path / "b.ouro", "-o")
    check_outside(art, "-o")
    (tmp_path / "manifest.json").write_text("{}")
    check_outside(tmp_path / "x.json", "-o")  # such a file is no artifact's by its name alone


def test_a_manifest_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    art = make_artifact(tmp_path / "a.ouro")
    monkeypatch.setattr(reader, "MOST_MANIFEST", 4096)
    with (art / "manifest.json").open("r+b") as file:
        file.truncate(3 << 30)
    with pytest.raises(ArtifactError, match="more than 4096 bytes"):
        reader.open_artifact(art, "sizes")
