"""Who may import whom: every import of every file, those inside functions included, against the table of rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ouro_build"

ROOMS = {
    "artifacts": {"artifacts"},
    "kernels": {"kernels", "artifacts"},
    "runtime": {"runtime", "artifacts"},
    "builder": {"builder", "runtime", "kernels", "artifacts", "templates"},
    "templates": {"templates"},
}
REFERENCE_EXECUTOR = "runtime/reference.py"
TORCH_BASELINE = "runtime/torch_*.py"

# The worker's and the artifact tools' path needs none of these. The first pattern that fits a file decides.
HEAVY = {"torch", "triton", "transformers"}
FORBIDDEN: list[tuple[str, set[str]]] = [
    ("artifacts/*", HEAVY | {"jinja2", "cuda"}),
    (REFERENCE_EXECUTOR, {"triton", "transformers", "jinja2"}),
    (TORCH_BASELINE, {"triton", "transformers", "jinja2"}),
    ("runtime/*", HEAVY | {"jinja2"}),
    ("kernels/*/reference.py", {"triton", "transformers"}),
    ("kernels/*/source.py", {"torch", "transformers"}),
    ("kernels/*__init__.py", HEAVY),
    ("kernels/registry.py", HEAVY),
    ("kernels/spec.py", HEAVY),
    ("templates/*", HEAVY),
]


def imported(text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a source, `import_module` of a literal included; a relative one as `.name`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            literals = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            yield from ((node.lineno, name) for name in islice(literals, 1))


def violations(path: str, text: str) -> list[str]:
    """What the file at `path`, relative to the package, imports and must not."""
    room = path.split("/")[0]
    allowed = ROOMS[room] | ({"kernels"} if path == REFERENCE_EXECUTOR else set())
    forbidden = next((names for pattern, names in FORBIDDEN if fnmatch(path, pattern)), set())
    found = []
    for line, name in imported(text):
        first, _, rest = name.partition(".")
        relative_or_by_folder = first in {"", "tests", *ROOMS}
        other_room = first == "ouro_build" and rest.split(".")[0] not in allowed
        if relative_or_by_folder or other_room or first in forbidden:
            found.append(f"{path}:{line}: {name}")
    return found


def files() -> list[str]:
    return sorted(str(p.relative_to(SOURCE)) for room in ROOMS for p in (SOURCE / room).rglob("*.py"))


def test_every_folder_of_the_package_is_a_room() -> None:
    assert {p.name for p in SOURCE.iterdir() if p.name != "__pycache__"} == set(ROOMS)
    assert len(files()) > len(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_keep_to_their_table(room: str) -> None:
    found = [v for path in files() if path.startswith(f"{room}/") for v in violations(path, (SOURCE / path).read_text())]
    assert not found, "\n".join(found)


def test_no_kernel_file_mixes_torch_and_triton() -> None:
    for path in files():
        if path.startswith("kernels/"):
            first = {name.split(".")[0] for _, name in imported((SOURCE / path).read_text())}
            assert not {"torch", "triton"} <= first, path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("artifacts/plan.py", "from ouro_build.kernels import spec"),
        ("artifacts/plan.py", "from ouro_build import kernels"),
        ("artifacts/plan.py", "def f():\n    import torch.nn"),
        ("artifacts/plan.py", "from . import errors"),
        ("artifacts/plan.py", "from ..kernels import spec"),
        ("artifacts/plan.py", "import kernels"),
        ("runtime/engine.py", "import ouro_build.builder.record"),
        ("runtime/engine.py", "def f():\n    from ouro_build.kernels import registry"),
        ("runtime/engine.py", "from importlib import import_module\nimport_module('ouro_build.builder')"),
        ("runtime/engine.py", "import importlib\ndef f(n):\n    importlib.import_module(f'ouro_build.kernels.{n}')"),
        ("runtime/engine.py", "from jinja2 import Template"),
        (REFERENCE_EXECUTOR, "import triton"),
        (TORCH_BASELINE, "from ouro_build.kernels import registry"),
        ("kernels/argmax/reference.py", "import triton.language as tl"),
        ("kernels/argmax/source.py", "import torch"),
        ("kernels/argmax/__init__.py", "import torch"),
        ("kernels/__init__.py", "import triton"),
        ("kernels/argmax/source.py", "from ouro_build.runtime import engine"),
        ("templates/__init__.py", "from ouro_build.artifacts import errors"),
        ("builder/record.py", "from tests import kernel_harness"),
    ],
)
def test_the_check_finds(path: str, text: str) -> None:
    assert len(violations(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("artifacts/plan.py", "import numpy\nfrom ouro_build.artifacts.errors import OuroError"),
        (REFERENCE_EXECUTOR, "import torch\nfrom ouro_build.kernels import registry"),
        (TORCH_BASELINE, "import torch"),
        ("kernels/argmax/source.py", "import triton"),
        ("kernels/argmax/reference.py", "import torch"),
        ("builder/compile.py", "import triton\nfrom ouro_build import kernels, runtime"),
    ],
)
def test_the_check_permits(path: str, text: str) -> None:
    assert violations(path, text) == []
