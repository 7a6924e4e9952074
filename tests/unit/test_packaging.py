"""What `pyproject.toml` says against what is there: packages, data files, extras, commands, pins."""

from __future__ import annotations

import ast
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_namespace_packages

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = CONFIG["project"]["optional-dependencies"]


@cache
def package_files() -> tuple[Path, ...]:
    """Every file of the package, relative to its source folder. The links in there are followed."""
    rooms = (SOURCE / "ouro_build").iterdir()
    every = (p for room in rooms for p in room.rglob("*"))
    return tuple(sorted(p.relative_to(SOURCE) for p in every if p.is_file() and "__pycache__" not in p.parts))


def installed_by(extra: str | None) -> set[str]:
    """Names of what an extra asks for, other extras of ours resolved; None is the base install."""
    names: set[str] = set()
    for requirement in map(Requirement, CONFIG["project"]["dependencies"] if extra is None else EXTRAS[extra]):
        if requirement.name == "ouro-build":
            names.update(*(installed_by(e) for e in requirement.extras))
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def test_the_packages_found_are_the_folders_with_modules() -> None:
    find = CONFIG["tool"]["setuptools"]["packages"]["find"]
    assert (ROOT / find["where"][0], find["namespaces"]) == (SOURCE, True)
    packages = set(find_namespace_packages(str(SOURCE), exclude=find["exclude"]))
    wanted = {".".join(p.parent.parts) for p in package_files() if p.suffix == ".py"}
    assert {"ouro_build.artifacts", "ouro_build.kernels.rms_norm"} <= wanted <= packages
    assert not [name for name in packages if "__pycache__" in name]


def test_every_folder_with_modules_says_what_it_is() -> None:
    for folder in {p.parent for p in package_files() if p.suffix == ".py"}:
        assert ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text())), folder


def test_every_data_file_is_packaged() -> None:
    patterns: dict[str, list[str]] = CONFIG["tool"]["setuptools"]["package-data"]
    for path in package_files():
        package = ".".join(path.parent.parts)
        mine = [pattern for name, listed in patterns.items() if fnmatch(package, name) for pattern in listed]
        assert path.suffix == ".py" or any(fnmatch(path.name, p) for p in mine), f"{path} would be missing from the wheel"


def test_every_room_is_typed() -> None:
    rooms = {p.parts[1] for p in package_files()}
    assert {p.parts[1] for p in package_files() if p.name == "py.typed"} == rooms


def test_base_install_is_the_workers() -> None:
    base = installed_by(None)
    assert base == {"numpy", "msgspec", "safetensors", "tokenizers", "click", "rich", "jinja2", "cuda-bindings"}
    assert installed_by("reference") == {"torch"}
    assert installed_by("metrics") == {"prometheus-client"}
    assert installed_by("build") == {"torch", "triton", "transformers"}
    assert installed_by("build") < installed_by("test") < installed_by("dev")


def test_constraints_pin_everything_exactly_and_within_bounds() -> None:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins: dict[str, Version] = {}
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("#")):
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        assert canonicalize_name(requirement.name) not in pins, requirement
        pins[canonicalize_name(requirement.name)] = Version(specifier.version)
    listed = [*CONFIG["project"]["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    for requirement in map(Requirement, listed):
        if requirement.name != "ouro-build":
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    assert pins["torch"] == Version("2.13.0")
