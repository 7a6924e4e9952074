"""What a process really loads: the worker and the artifact tools start without torch, Triton or the builder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ouro_build"
COMMANDS = [
    "ouro_build.builder.cli", "ouro_build.builder.artifact_cli", "ouro_build.runtime.cli", "ouro_build.runtime.entry",
]  # fmt: skip
HEAVY = ["torch", "triton", "transformers", "jinja2"]


def modules(*patterns: str, without: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of the package's modules whose paths fit `patterns`."""
    found = {p.relative_to(SOURCE.parent).with_suffix("") for pattern in patterns for p in SOURCE.glob(pattern)}
    names = {".".join(p.parts).removesuffix(".__init__") for p in found}
    assert names
    return sorted(names - set(without))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, check=False, cwd="/")


def loaded_by(names: list[str]) -> set[str]:
    """Every module in a new process after importing `names`."""
    done = python("-c", f"import json, sys\nimport {', '.join(names)}\nprint(json.dumps(list(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def strangers(loaded: set[str], roots: list[str]) -> list[str]:
    return sorted(m for m in loaded for root in roots if m == root or m.startswith(root + "."))


def test_the_runtime_loads_nothing_of_the_builder() -> None:
    torch_is_theirs = ("ouro_build.runtime.reference", "ouro_build.runtime.torch_baseline")
    loaded = loaded_by(modules("runtime/**/*.py", without=torch_is_theirs))
    assert "ouro_build.runtime.executor" in loaded
    assert strangers(loaded, [*HEAVY, "ouro_build.builder", "ouro_build.kernels", "ouro_build.templates"]) == []


def test_the_artifact_format_stands_alone() -> None:
    loaded = loaded_by(modules("artifacts/**/*.py"))
    others = [f"ouro_build.{room}" for room in ("builder", "kernels", "runtime", "templates")]
    assert strangers(loaded, [*HEAVY, "cuda", *others]) == []


def test_kernel_declarations_and_launch_rules_need_neither_torch_nor_triton() -> None:
    loaded = loaded_by(modules("kernels/__init__.py", "kernels/*/__init__.py", "kernels/registry.py", "kernels/spec.py"))
    assert strangers(loaded, HEAVY) == []


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_start_on_the_base_install(module: str) -> None:
    """With torch, triton and transformers missing, as on a worker, `--help` works."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'triton', 'transformers')))"
    done = python("-c", f"{blocked}; sys.argv = ['command', '--help']; from {module} import main; sys.exit(main())")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_run_as_modules(module: str) -> None:
    """So that `python -X importtime -m …` times the command, and does not silently do nothing."""
    done = python("-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
