import json
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ouro_build.artifacts import console
from ouro_build.artifacts.columns import GraphEntry, GraphStep
from ouro_build.artifacts.console import exit_code
from ouro_build.artifacts.fit import Machine
from ouro_build.artifacts.manifest import encode_manifest, sealed
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import Artifact, open_artifact
from ouro_build.artifacts.records import ObservedRecord, decode_record
from ouro_build.builder import warm
from ouro_build.builder.artifact_cli import cli
from ouro_build.builder.inspect import draw, percent_carved, view
from ouro_build.runtime import machine
from ouro_build.runtime.machine import probe
from tests.artifact_maker import make_artifact
from tests.unit.artifacts.test_records import OBSERVED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_artifact(folder / "reference.ouro")
    make_artifact(folder / "embedded.ouro", embedded=True)
    return folder


@pytest.fixture
def reference(folder: Path) -> Path:
    return folder / "reference.ouro"


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        code = exit_code(cli, [str(a) for a in arguments])
        out, err = self._capsys.readouterr()
        return code, out, err

    def json(self, *arguments: object, code: int = 0) -> Any:
        found, out, err = self(*arguments, "--json")
        assert (found, err) == (code, "")
        return json.loads(out)


@pytest.fixture
def ouro_artifact(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def damage(folder: Path, tmp_path: Path, name: str) -> Path:
    path = tmp_path / "damaged.ouro"
    shutil.copytree(folder, path)
    file = path / name
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    return path


def test_inspect(ouro_artifact: Cli, reference: Path) -> None:
    found = ouro_artifact.json("inspect", reference)
    assert found["identity"] == open_artifact(reference).identity
    assert found["model"]["loops"] == 4
    assert found["weights"]["embedded"] is False
    target = found["targets"][0]
    assert (target["part"], target["arch"], target["kv_blocks"]) == ("h200", "sm_90", 8)
    plans = [(p["program"], p["bucket"], p["launches"], p["programmatic"], p["full"]) for p in target["plans"]]
    assert plans == [("prelude", 1, 1, 0, 0), ("recurrent", 2, 2, 1, 0)]
    assert target["images"][0]["constants"] == {"SIZE": 64, "FAST": True, "MASK": None, "KIND": "plain"}
    assert {p["pool"]: p["buffers"] for p in target["pools"] if p["buffers"]} == {
        "weights": 1,
        "kv": 1,
        "workspace": 1,
        "io": 1,
    }
    code, out, err = ouro_artifact("inspect", reference)
    assert (code, err) == (0, "")
    for piece in (found["identity"], "synthetic weights, seed 7", "by reference", "recurrent/dense", "SIZE=64", "rtx-5090"):
        assert piece in out


def test_graphs_of_several_runs_are_shown_and_compared(ouro_artifact: Cli, reference: Path, tmp_path: Path) -> None:
    token = GraphEntry(ProgramKey("token", 1), (GraphStep(0), GraphStep(1, 4)))
    single = GraphEntry(ProgramKey("recurrent", 2), (GraphStep(1),))
    other = make_artifact(tmp_path / "other.ouro", graphs=(single, token))
    (target, _) = ouro_artifact.json("inspect", other)["targets"]
    assert [(g["program"], g["bucket"], g["nodes"]) for g in target["graphs"]] == [("recurrent", 2, 2), ("token", 1, 9)]
    assert target["graphs"][1]["steps"] == [
        {"plan": "prelude/1/dense", "times": 1, "join": "full"},
        {"plan": "recurrent/2/dense", "times": 4, "join": "full"},
    ]
    _, out, _ = ouro_artifact("inspect", other)
    assert "graphs of several runs for h200" in out
    assert "token/dense" in out
    assert "4 × recurrent/2/dense (full)" in " ".join(out.split())
    _, out, _ = ouro_artifact("inspect", reference)
    assert "graphs of several runs" not in out
    changed = {f["what"]: (f["a"], f["b"]) for f in ouro_artifact.json("diff", reference, other, code=1)["fields"]}
    assert changed["plans/h200.json:graphs[token/1/dense].steps[1].times"] == (None, 4)
    assert changed["plans/h200.json:graphs[prelude/1/dense].steps[0].plan"] == (0, None)


def test_records_of_one_file_are_compared_each(ouro_artifact: Cli, reference: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.ouro"
    shutil.copytree(reference, other)
    manifest = open_artifact(reference).manifest
    target, *rest = manifest.targets
    first, second = target.images
    images = (first, msgspec.structs.replace(second, path=first.path, shared=2048))
    changed = sealed(msgspec.structs.replace(manifest, targets=(msgspec.structs.replace(target, images=images), *rest)))
    (other / "manifest.json").chmod(0o644)
    (other / "manifest.json").write_bytes(encode_manifest(changed))
    found = {f["what"]: f["b"] for f in ouro_artifact.json("diff", reference, other, code=1)["fields"]}
    assert found[f"targets[h200].images[{first.path}, 1].shared"] == 2048


@pytest.mark.parametrize(("carveout", "shown"), [(-1, "–"), (0, "0 %"), (75, "75 %")])
def test_a_carveout_for_people(carveout: int, shown: str) -> None:
    assert percent_carved(carveout) == shown


def test_carveouts_of_images_are_shown(reference: Path) -> None:
    plain = view(open_artifact(reference))
    (target, *rest), replace = plain.targets, msgspec.structs.replace
    images = (replace(target.images[0], carveout=75), *target.images[1:])
    text = StringIO()
    Console(width=200, file=text).print(draw(replace(plain, targets=(replace(target, images=images), *rest))))
    assert "carve-out" in text.getvalue()
    assert text.getvalue().count("75 %") == 1


def test_verify(ouro_artifact: Cli, folder: Path, tmp_path: Path) -> None:
    found = ouro_artifact.json("verify", folder / "embedded.ouro")
    assert found["files"] == len(open_artifact(folder / "embedded.ouro").manifest.files)
    damaged = damage(folder / "embedded.ouro", tmp_path, "weights.safetensors")
    code, out, err = ouro_artifact("verify", damaged)
    assert (code, out) == (4, "")
    assert err.startswith(f"error: {damaged}: weights.safetensors: sha256 is")
    assert "build it again" in err


@pytest.mark.parametrize("command", ["inspect", "fit", "diff", "embed"])
def test_no_command_takes_a_damaged_artifact(
    ouro_artifact: Cli, reference: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "probe", lambda device: Machine.absent("none"))
    damaged = damage(reference, tmp_path, "manifest.json")
    more = {"diff": [str(reference)], "embed": ["--weights", "preset:tiny", "-o", str(tmp_path / "out.ouro")]}
    code, out, err = ouro_artifact(command, damaged, *more.get(command, []))
    assert (code, out) == (4, "")
    assert "manifest.json" in err
    assert list(tmp_path.iterdir()) == [damaged]


def test_wrong_usage(ouro_artifact: Cli, reference: Path, tmp_path: Path) -> None:
    for arguments in (
        ["inspect"],
        ["inspect", tmp_path / "none.ouro"],
        ["fit", reference, "--memory", "much"],
        ["embed", reference, "--weights", "preset:huge", "-o", tmp_path / "out.ouro"],
        ["unknown"],
    ):
        code, out, err = ouro_artifact(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err


def test_fit(ouro_artifact: Cli, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine.of_part(find_part("h200"))
    monkeypatch.setattr(machine, "probe", lambda device: msgspec.structs.replace(here, cuda=(13, 0)))
    found = ouro_artifact.json("fit", reference)
    assert found["target"] == "h200"
    assert {k["part"]: k["target"] for k in found["known"] if k["target"]} == {
        "h200": "h200",
        "h100": "h200",
        "h100-pcie": "h200",
        "rtx-5090": "rtx-5090",
        "rtx-pro-6000": "rtx-5090",
    }
    for known in found["known"]:
        assert bool(known["reasons"]) == (known["target"] is None), "what is said of a part that runs it is a note"
    (h200,) = [k for k in found["known"] if k["part"] == "h200"]
    assert h200["notes"] == ["cuda: needs a driver for CUDA 13 or newer"]
    code, out, _ = ouro_artifact("fit", reference)
    assert code == 0
    assert "this machine: h200, 9.0, 132 SMs" in out
    code, out, _ = ouro_artifact("fit", reference, "--memory", "1GiB")
    assert code == 3
    assert "memory: " in out
    assert "--memory" in out


def test_fit_without_a_gpu(ouro_artifact: Cli, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "probe", lambda device: Machine.absent("no driver"))
    found = ouro_artifact.json("fit", reference, code=3)
    assert found["target"] is None
    assert found["targets"][0]["refusals"][0]["found"] == "no driver"
    code, out, _ = ouro_artifact("fit", reference)
    assert code == 3
    assert "no usable GPU (no driver)" in out


def test_diff(ouro_artifact: Cli, folder: Path, reference: Path, tmp_path: Path) -> None:
    assert ouro_artifact.json("diff", reference, reference)["equal"] is True
    found = ouro_artifact.json("diff", reference, folder / "embedded.ouro", code=1)
    assert found["fields"] == [{"what": "weights.embedded", "a": False, "b": True}]
    assert [f["what"] for f in found["files"]] == ["weights.safetensors"]
    other = make_artifact(tmp_path / "other.ouro", ("h200",), stop_ids=(1, 2))
    changed = {f["what"]: (f["a"], f["b"]) for f in ouro_artifact.json("diff", reference, other, code=1)["fields"]}
    assert changed["stop_ids"] == ([0], [1, 2])
    assert changed["targets[rtx-5090].part.sm_count"] == (170, None)
    code, out, _ = ouro_artifact("diff", reference, other)
    assert code == 1
    assert "stop_ids" in out
    assert "--json lists them all" in out


def test_embed_writes_what_a_build_would(ouro_artifact: Cli, folder: Path, reference: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.ouro"
    found = ouro_artifact.json("embed", reference, "--weights", "preset:tiny", "-o", output)
    built = folder / "embedded.ouro"
    assert found["identity"] == open_artifact(built).identity
    assert {p.relative_to(output): p.read_bytes() for p in output.rglob("*") if p.is_file()} == {
        p.relative_to(built): p.read_bytes() for p in built.rglob("*") if p.is_file()
    }
    code, _, err = ouro_artifact("embed", reference, "--weights", output, "-o", output)
    assert code == 1
    assert "exists already" in err
    # The packed file of the other artifact is a source like any other.
    assert ouro_artifact("embed", reference, "--weights", output, "-o", output, "--force")[0] == 0
    assert open_artifact(output).identity == found["identity"]
    code, _, err = ouro_artifact("embed", output, "--weights", "preset:tiny", "-o", tmp_path / "again.ouro")
    assert code == 2
    assert "holds its weights already" in err


def test_embed_refuses_other_weights(ouro_artifact: Cli, reference: Path, folder: Path, tmp_path: Path) -> None:
    packed = damage(folder / "embedded.ouro", tmp_path, "weights.safetensors") / "weights.safetensors"
    raw = bytearray(packed.read_bytes())
    raw[8192] ^= 1
    packed.write_bytes(raw)
    code, _, err = ouro_artifact("embed", reference, "--weights", packed, "-o", tmp_path / "out.ouro")
    assert code == 1
    assert "embedding" in err
    assert "differ from the weights the artifact was built for" in err
    assert not (tmp_path / "out.ouro").exists()
    code, _, err = ouro_artifact("embed", reference, "--weights", "preset:ouro-1.4b", "-o", tmp_path / "out.ouro")
    assert code == 1
    assert "another model" in err


def test_warm_names_its_extra(ouro_artifact: Cli, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    code, _, err = ouro_artifact("warm", reference)
    assert code == 1
    assert "pip install 'ouro-build[reference]'" in err


def test_warm_without_a_gpu_is_a_machine_that_does_not_fit(ouro_artifact: Cli, reference: Path) -> None:
    if not probe().reason:
        pytest.skip("this machine has a GPU")
    code, _, err = ouro_artifact("warm", reference)
    assert code == 3
    assert "no CUDA driver" in err or "CUDA cannot start" in err or "no device" in err


def test_warm(ouro_artifact: Cli, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(artifact: Artifact, folder: Path, **options: Any) -> ObservedRecord:
        options.pop("progress")(1, 1)
        asked.append((artifact.identity, folder, options))
        return OBSERVED

    monkeypatch.setattr(warm, "warm", run)
    code, out, err = ouro_artifact("warm", reference, "--weights", "preset:tiny", "--device", 1)
    assert (code, err.strip()) == (0, f"recorded in {reference.resolve()}.observed")
    assert "NVIDIA H200" in out
    code, out, _ = ouro_artifact("warm", reference, "--record", tmp_path, "--json")
    assert decode_record(out.encode(), ObservedRecord, "stdout") == OBSERVED
    assert asked == [
        (open_artifact(reference).identity, Path(f"{reference.resolve()}.observed"), {"weights": "preset:tiny", "device": 1}),
        (open_artifact(reference).identity, tmp_path, {"weights": None, "device": 0}),
    ]


def test_interrupted(ouro_artifact: Cli, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(device: int) -> Machine:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "probe", interrupt)
    code, out, err = ouro_artifact("fit", reference)
    assert (code, out) == (130, "")
    assert "interrupted" in err


def test_runs_without_torch(reference: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'transformers', 'jinja2'): sys.modules[name] = None\n"
        "from ouro_build.artifacts.console import exit_code\n"
        "from ouro_build.builder.artifact_cli import cli\n"
        "art, out = sys.argv[1:]\n"
        "for line in (['inspect', art], ['verify', art], ['diff', art, art], ['fit', art, '--json'],\n"
        "             ['embed', art, '--weights', 'preset:tiny', '-o', out]):\n"
        "    assert exit_code(cli, line) in (0, 3), line\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(reference), str(tmp_path / "out.ouro")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
