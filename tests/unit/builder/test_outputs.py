"""Where a command cannot write, it says so before it works."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.reader import open_artifact
from ouro_build.builder.artifact_cli import cli
from tests.artifact_maker import make_artifact


@pytest.mark.parametrize(
    ("place", "problem"),
    [("", "is a folder"), (".", "is a folder"), ("/", "is a folder"), ("no/such/file", "does not exist")],
)
@pytest.mark.parametrize("command", ["report", "tune"])
def test_a_place_that_is_no_file_is_refused(
    command: str, place: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make_artifact(tmp_path / "a.ouro")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=f"-o .*{problem}"):
        CliRunner().invoke(cli, [command, str(artifact), "-o", place], standalone_mode=False, catch_exceptions=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_replaces_no_artifact_and_none_of_its_sources(tmp_path: Path) -> None:
    artifact, record = make_artifact(tmp_path / "a.ouro"), tmp_path / "c.json"
    record.write_text("kept")
    for arguments, problem in (
        ([str(artifact), "-o", str(artifact / "manifest.json")], "lies in the artifact"),
        (["--coverage", str(record), "-o", str(record)], "is also --coverage"),
        ([str(artifact), "--against", str(record), "-o", str(record)], "is also --against"),
    ):
        with pytest.raises(UsageError, match=problem):
            CliRunner().invoke(cli, ["report", *arguments], standalone_mode=False, catch_exceptions=False)
    assert record.read_text() == "kept"
    open_artifact(artifact, "full")
