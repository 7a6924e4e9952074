import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ouro_build.artifacts import writer
from ouro_build.artifacts.columns import GraphEntry, GraphStep, decode
from ouro_build.artifacts.errors import ArtifactError, UsageError, VersionError
from ouro_build.artifacts.manifest import FORMAT, decode_manifest, encode_manifest, sealed
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import open_artifact
from tests.artifact_maker import ORACLE, PLANS, TOKENIZER, make_artifact

TOKEN = ProgramKey("token", 1)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("sound") / "tiny.ouro", embedded=True)


@pytest.fixture(scope="module")
def scratch(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for tests that damage it and put it right again."""
    return copied(sound, tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return copied(sound, tmp_path)


def copied(sound: Path, folder: Path) -> Path:
    path = folder / "copy.ouro"
    shutil.copytree(sound, path)
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    return path


def files_of(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file())


@pytest.mark.parametrize("verify", ["full", "all_but_weights", "sizes"])
def test_reads_back_what_was_written(sound: Path, verify: str) -> None:
    artifact = open_artifact(sound, verify)  # type: ignore[arg-type]
    for target in artifact.manifest.targets:
        index, columns = artifact.plans(target)
        assert decode(index, columns) == PLANS
        assert artifact.read(target.images[0].path).startswith(b"\x7fELF images/" + target.part.arch.encode())
    assert artifact.oracle() == ORACLE
    assert artifact.tokenizer() == TOKENIZER
    assert artifact.observed_path == artifact.path.parent / "tiny.ouro.observed"


def test_graphs_of_several_runs_are_read(tmp_path: Path) -> None:
    graphs = (GraphEntry(PLANS[1].key, (GraphStep(1),)), GraphEntry(TOKEN, (GraphStep(0), GraphStep(1, 4))))
    artifact = open_artifact(make_artifact(tmp_path / "tiny.ouro", ("h200",), graphs=graphs))
    index, _ = artifact.plans(artifact.manifest.targets[0])
    assert index.graphs == graphs


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (GraphEntry(TOKEN, (GraphStep(0, 0),)), r"plans/h200.json: graphs\[0\] \(token/1/dense\): it runs a plan 0 times"),
        (GraphEntry(ProgramKey("token", 1, "consume"), (GraphStep(0),)), "token/1/consume has no rows, or a mode"),
        (GraphEntry(ProgramKey("token", 0), (GraphStep(0),)), "token/0/dense has no rows, or a mode"),
    ],
)
def test_graphs_that_cannot_be_are_neither_written_nor_read(
    tmp_path: Path, graph: GraphEntry, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArtifactError, match=message):
        make_artifact(tmp_path / "tiny.ouro", ("h200",), graphs=(graph,))
    monkeypatch.setattr(writer, "check_plans", lambda *_: None)
    monkeypatch.setattr(writer, "check_graphs", lambda *_: None)
    path = make_artifact(tmp_path / "tiny.ouro", ("h200",), graphs=(graph,))
    with pytest.raises(ArtifactError, match=message):
        open_artifact(path)


def test_two_builds_are_the_same_bytes(sound: Path, tmp_path: Path) -> None:
    again = make_artifact(tmp_path / "other.ouro", embedded=True)
    assert [(f.relative_to(again), f.read_bytes(), f.stat().st_mode) for f in files_of(again)] == [
        (f.relative_to(sound), f.read_bytes(), f.stat().st_mode) for f in files_of(sound)
    ]


@given(data=st.data())
@settings(max_examples=100)
def test_any_flipped_bit_is_refused(scratch: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files_of(scratch)))
    kept = file.read_bytes()
    raw = bytearray(kept)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    try:
        with pytest.raises((ArtifactError, VersionError)) as caught:
            open_artifact(scratch)
    finally:
        file.write_bytes(kept)
    assert file.name in str(caught.value)
    assert isinstance(caught.value, ArtifactError) or f'"format":"{FORMAT}"'.encode() not in raw


def test_weights_packed_in_another_order_are_refused_by_its_name(copy: Path) -> None:
    manifest = decode_manifest((copy / "manifest.json").read_bytes())
    weights = msgspec.structs.replace(manifest.weights, layout="row_major/1")
    (copy / "manifest.json").write_bytes(encode_manifest(sealed(msgspec.structs.replace(manifest, weights=weights))))
    with pytest.raises(
        VersionError, match=r"packed as 'row_major/1', this software reads 'blocks_16x32/1'\nBuild the"
    ) as caught:
        open_artifact(copy)
    assert caught.value.where == f"{copy}: manifest.json: weights.layout"


def test_every_byte_of_the_manifest_counts(copy: Path) -> None:
    manifest = copy / "manifest.json"
    sound = manifest.read_bytes()
    for at in range(0, len(sound), 31):
        manifest.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises((ArtifactError, VersionError)):
            open_artifact(copy, "sizes")


@given(data=st.data())
@settings(max_examples=40)
def test_any_changed_length_or_missing_file_is_refused(
    sound: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = copied(sound, tmp_path_factory.mktemp("size"))
    file = data.draw(st.sampled_from(files_of(path)))
    raw = file.read_bytes()
    kind = data.draw(st.sampled_from(["shorter", "longer", "gone", "empty"]))
    if kind == "gone":
        file.unlink()
    else:
        file.write_bytes({"shorter": raw[:-1], "longer": raw + b"\n", "empty": b""}[kind])
    with pytest.raises(ArtifactError, match=file.name) as caught:
        open_artifact(path, "sizes")
    assert caught.value.exit_code == 4
    assert caught.value.hint
    shutil.rmtree(path)


def _link_for(path: Path) -> None:
    """Move what is at `path` out of the artifact and leave a link to it."""
    away = path.parents[1] / path.name
    path.rename(away)
    path.symlink_to(away)


def _folder_for(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _file_for(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


ADDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (lambda p: (p / "extra.txt").write_text("x"), r"extra\.txt: unexpected file"),
    "file in a folder": (lambda p: (p / "plans" / ".hidden").write_text("x"), r"plans/\.hidden: unexpected file"),
    "folder": (lambda p: (p / "empty").mkdir(), "empty: unexpected folder"),
    "link": (lambda p: (p / "link").symlink_to("manifest.json"), "link: a symbolic link"),
    "link for a file": (lambda p: _link_for(p / "oracle.json"), r"oracle\.json: a symbolic link"),
    "link for a folder": (lambda p: _link_for(p / "plans"), "plans: a symbolic link"),
    "pipe": (lambda p: os.mkfifo(p / "pipe"), "pipe: a symbolic link or special file"),
    "folder for a file": (lambda p: _folder_for(p / "oracle.json"), r"oracle\.json: unexpected folder"),
    "file for a folder": (lambda p: _file_for(p / "plans"), "plans: unexpected file"),
}


@pytest.mark.parametrize("name", list(ADDED))
def test_anything_added_is_refused(copy: Path, name: str) -> None:
    change, message = ADDED[name]
    change(copy)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(copy, "sizes")


def test_what_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such artifact"):
        open_artifact(tmp_path / "none.ouro")
    with pytest.raises(ArtifactError, match=r"manifest\.json: missing"):
        open_artifact(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="not a folder"):
        open_artifact(tmp_path / "file")


def test_sizes_leaves_digests_to_the_reading(copy: Path) -> None:
    raw = bytearray((copy / "oracle.json").read_bytes())
    raw[-2] ^= 1
    (copy / "oracle.json").write_bytes(raw)
    artifact = open_artifact(copy, "sizes")
    with pytest.raises(ArtifactError, match=r"oracle\.json: sha256 is"):
        artifact.oracle()
    with pytest.raises(ArtifactError, match="no such file"):
        artifact.read("nothing")


def test_only_the_weights_are_left_to_who_streams_them(copy: Path) -> None:
    for file in files_of(copy):
        kept = file.read_bytes()
        file.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
        if file.name == "weights.safetensors":
            open_artifact(copy, "all_but_weights")
        else:
            with pytest.raises(ArtifactError, match=file.name) as caught:
                open_artifact(copy, "all_but_weights")
            assert caught.value.hint
        file.write_bytes(kept)


def test_may_be_reached_through_a_link(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "link.ouro").symlink_to(sound)
    assert open_artifact(tmp_path / "link.ouro").path == sound.resolve()


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, ouro_build.artifacts.reader, ouro_build.artifacts.fit, ouro_build.artifacts.console\n"
        "heavy = {'torch', 'triton', 'jinja2', 'transformers', 'rich', 'ouro_build.kernels', 'ouro_build.builder'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_manifest_that_is_no_ordinary_file_is_not_opened(copy: Path, make: Callable[[Path], None]) -> None:
    (copy / "manifest.json").unlink()
    make(copy / "manifest.json")
    with pytest.raises(ArtifactError, match=r"manifest\.json: not an ordinary file"):
        open_artifact(copy)
