"""Builds for GPUs that are not there, by the command, in processes of their own."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ouro_build.artifacts.parts import ARCHITECTURES, find_part
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.tuning import Entry, Fragments, TuningTable, encode_table
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.compile import Job, compile_images, jobs
from ouro_build.builder.cubin import read_cubin
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.builder.toolchain import find_toolchain
from tests.cross.conftest import MakeOnce

pytest.importorskip("triton", reason="triton compiles")

COMMAND = [sys.executable, "-P", "-c", "from ouro_build.builder.cli import main; main()"]
SHAPE = ["--model", "preset:tiny", "--buckets", "1,2", "--prefill-buckets", "16", "--max-context", "64", "--workers", "2"]
CUOBJDUMP = "backends/nvidia/bin/cuobjdump"
# The projection that follows attention in preset:tiny.
TUNED = Fragments(block_n=32, warps=2, step=32, ahead=1, x_ahead=1, maxnreg=0)
ENTRY = Entry(kernel="linear_few", bits=16, rows=1, sizes=(64, 64), parameters=TUNED)


def start(folder: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    """Start a build of `folder`/out.ouro."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*COMMAND, *SHAPE, "-o", "out.ouro", *more],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def build(folder: Path, *more: str, **environment: str) -> dict[str, object]:
    """Build, and return what `--json` printed."""
    process = start(folder, "--json", *more, **environment)
    out, err = process.communicate()
    assert process.returncode == 0, err
    found: dict[str, object] = json.loads(out)
    return found


@pytest.fixture(scope="session")
def cache(make_once: MakeOnce) -> Path:
    """A cache that every image of SHAPE for sm_90 is in, beside the artifact that filled it, `out.ouro`."""

    def make(folder: Path) -> None:
        build(folder, "--gpu", "sm_90", "--cache-dir", str(folder / "cache"))

    return make_once("first", make) / "cache"


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_the_artifact_opens_and_holds_what_was_asked_for(cache: Path) -> None:
    artifact = open_artifact(cache.parent / "out.ouro")
    manifest = artifact.manifest
    target = manifest.target("h200")
    assert target is not None
    assert manifest.source.synthetic
    assert manifest.kv_digest == manifest.kv.digest
    index, _ = artifact.plans(target)
    assert len(index.specializations) == len(target.images)
    for image in target.images:
        info = read_cubin(artifact.read(image.path), image.function)
        assert (info.registers, info.stack, info.parameters) == (image.registers, image.spills, image.parameters)
    oracle = artifact.oracle()
    assert len(oracle.prompt_ids) == len(oracle.greedy_ids) == 16


def test_the_same_bytes_whatever_is_set_and_wherever_it_is_built(cache: Path, tmp_path: Path) -> None:
    """Empty cache against a full one; TRITON_* and friends set to things that change or break a compile."""
    hostile = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_PTXAS_PATH": "/nonexistent/ptxas",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "TRITON_F32_DEFAULT": "tf32",
        "TRITON_INTERPRET": "1",
        "DISABLE_PTXAS_OPT": "1",
        "PTXAS_OPTIONS": "-O0",
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "2",
    }
    build(tmp_path / "a" / "deeper", "--gpu", "sm_90", "--cache-dir", str(tmp_path / "empty"), **hostile)
    assert tree(tmp_path / "a" / "deeper" / "out.ouro") == tree(cache.parent / "out.ouro")


def test_weights_by_reference_leave_everything_else_the_same(cache: Path, tmp_path: Path) -> None:
    build(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache), "--weights", "reference")
    embedded, named = tree(cache.parent / "out.ouro"), tree(tmp_path / "out.ouro")
    assert embedded.keys() - named.keys() == {"weights.safetensors"}
    assert {k for k in named if named[k] != embedded[k]} == {"manifest.json"}


def table(folder: Path, *entries: Entry) -> str:
    """The path of a table's file."""
    path = folder / "table.json"
    path.write_bytes(encode_table(TuningTable(name="given", arch="sm_90", source="a test", entries=entries)))
    return str(path)


def test_a_build_takes_a_table_and_says_so(cache: Path, tmp_path: Path) -> None:
    build(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache), "--tuning", table(tmp_path, ENTRY))
    (target,) = open_artifact(tmp_path / "out.ouro").manifest.targets
    assert [(r.name, r.match) for r in target.tuning] == [("given", "exact"), ("sm_90", "exact")]
    assert any(i.num_warps == 2 and "/linear_few-" in i.path for i in target.images)


def test_an_entry_that_spills_is_named(cache: Path, tmp_path: Path) -> None:
    small = Fragments(block_n=128, warps=1, step=64, ahead=1, x_ahead=1, maxnreg=32)
    entry = Entry(kernel="linear_few", bits=16, rows=1, sizes=(64, 64), parameters=small)
    process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache), "--tuning", table(tmp_path, entry))
    _, err = process.communicate()
    assert process.returncode == 0
    assert "slower: entry 'linear_few, 16 bits, 64 × 64, 1 rows' (" in " ".join(err.split())
    assert (tmp_path / "out.ouro").exists()


def test_an_entry_that_does_not_compile_is_named_without_the_compilers_dump(cache: Path, tmp_path: Path) -> None:
    entry = msgspec.structs.replace(ENTRY, parameters=msgspec.structs.replace(TUNED, maxnreg=8))
    process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache), "--tuning", table(tmp_path, entry))
    _, err = process.communicate()
    assert process.returncode == 1
    _, what, hint = err.splitlines()
    assert what.startswith("error: --tuning: entry 'linear_few, 16 bits, 64 × 64, 1 rows': it does not compile: ")
    assert "Insufficient registers" in what
    assert "/tmp" not in what
    assert hint == "Tune on sm_90 again, or take the entry out of the table."
    assert not (tmp_path / "out.ouro").exists()


def test_force_replaces_and_its_absence_refuses(cache: Path, tmp_path: Path) -> None:
    build(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache))
    first = open_artifact(tmp_path / "out.ouro").identity
    process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache))
    assert "--force" in process.communicate()[1]
    assert process.returncode == 1
    build(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache), "--force", "--seed", "1")
    assert open_artifact(tmp_path / "out.ouro").identity != first


def test_a_damaged_cache_entry_is_compiled_again(cache: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(cache, tmp_path / "cache")
    victim = next(p for p in copy.rglob("*") if p.is_file())
    victim.write_bytes(victim.read_bytes()[:-7])
    build(tmp_path, "--gpu", "sm_90", "--cache-dir", str(copy))
    assert tree(tmp_path / "out.ouro") == tree(cache.parent / "out.ouro")
    assert victim.read_bytes() == (cache / victim.relative_to(copy)).read_bytes()


def test_an_interrupt_ends_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(tmp_path / "cache"))
    wait_until(process, lambda: list((tmp_path / "cache").glob("*/*")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} <= {"cache"}


def test_an_interrupt_is_no_business_of_compilers_that_only_start(tmp_path: Path) -> None:
    """A terminal interrupts every process at once, those that have not run a line of ours yet too."""
    process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(tmp_path / "cache"))
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(process, lambda: any(imports_numpy(child) for child in listed.read_text().split()))
    for number in (*map(int, listed.read_text().split()), process.pid):
        os.kill(number, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert {p.name for p in tmp_path.iterdir()} <= {"cache"}


def imports_numpy(process: str) -> bool:
    """Whether a process of ours has begun its imports."""
    return "numpy" in Path(f"/proc/{process}/maps").read_text()


def test_a_build_killed_while_it_compiles_leaves_no_processes_and_no_scratch(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(tmp_path / "cache"), TMPDIR=str(scratch))
    wait_until(process, lambda: list(scratch.glob("ouro-build-*/*/talk")))
    process.kill()
    process.communicate()  # returns when the last process that holds its stderr has ended
    assert not (tmp_path / "out.ouro").exists()
    wait_until(None, lambda: not list(scratch.iterdir()))


def test_killed_builds_leave_nothing_under_the_final_name(cache: Path, tmp_path: Path) -> None:
    chance = random.Random(2)
    for _ in range(5):
        process = start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache))
        time.sleep(chance.uniform(0.5, 4))
        process.kill()
        process.communicate()
        if (tmp_path / "out.ouro").exists():
            open_artifact(tmp_path / "out.ouro")
            shutil.rmtree(tmp_path / "out.ouro")
    build(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache))
    assert [p.name for p in tmp_path.iterdir()] == ["out.ouro"]


def test_two_builders_of_one_output(cache: Path, tmp_path: Path) -> None:
    both = [start(tmp_path, "--gpu", "sm_90", "--cache-dir", str(cache)) for _ in range(2)]
    talk = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], talk
    open_artifact(tmp_path / "out.ouro")
    assert [p.name for p in tmp_path.iterdir()] == ["out.ouro"]


def test_every_architecture_compiles_and_is_read_rightly(tmp_path: Path) -> None:
    """One kernel for each; registers and stack as NVIDIA's own tool reads them."""
    parts = find_parts(ARCHITECTURES)
    tools = find_toolchain(parts)
    spec = BuildSpec(model="preset:tiny", parts=parts, buckets=(1,), prefill_buckets=(16,), max_context=64)
    work: list[Job] = []
    for target in prepare(spec).targets:
        chosen = [s for s in target.index.specializations if s.kernel in ("rms_norm", "attention_decode")]
        work += jobs(chosen, target.part.arch, tools)
    compiled = compile_images(work, ImageCache(tmp_path / "cache"), 2)
    assert compiled.cached == 0
    for job in work:
        image = compiled.images[job.key]
        path = tmp_path / "image.cubin"
        path.write_bytes(image.cubin)
        found = re.search(r"REG:(\d+) STACK:(\d+)", cuobjdump(path))
        assert found is not None
        assert (int(found[1]), int(found[2])) == (image.registers, image.spills), str(job)
        assert image.shared <= find_part(job.arch).shared
    again = compile_images(work, ImageCache(tmp_path / "cache"), 2)
    assert again.cached == len(again.images)
    assert again.images == compiled.images


def cuobjdump(path: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / CUOBJDUMP
    return subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout


def wait_until(process: subprocess.Popen[str] | None, reached: Callable[[], object]) -> None:
    """Until `reached` says so; the build must go on meanwhile."""
    deadline = time.monotonic() + 60
    while not reached():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
