"""The compilers of a build: which are installed, their versions, and which GPUs they know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import msgspec

from ouro_build.artifacts.errors import CompileError, MissingExtraError
from ouro_build.artifacts.parts import Part

# First CUDA release whose ptxas compiles for an architecture.
_FIRST_CUDA = {
    "sm_80": (11, 0),
    "sm_86": (11, 1),
    "sm_89": (11, 8),
    "sm_90": (11, 8),
    "sm_100": (12, 8),
    "sm_103": (12, 9),
    "sm_120": (12, 8),
    "sm_121": (12, 9),
}
_RELEASE = re.compile(r"release (\d+)\.(\d+), V([\d.]+)")
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")

# Triton chooses among its copies of ptxas by architecture, and not by the same rule in every version: it is asked.
_ASK = """
import json, subprocess, sys
from triton.backends.nvidia.compiler import get_ptxas
tools = {a: get_ptxas(int(a)).path for a in sys.argv[1:]}
print(json.dumps({a: subprocess.check_output([t, "--version"], text=True) for a, t in tools.items()}))
"""


@dataclass(frozen=True)
class Toolchain:
    """Versions of what decides an artifact's bytes; `ptxas` by architecture."""

    ouro_build: str
    triton: str
    torch: str
    ptxas: Mapping[str, str]

    def packages(self) -> tuple[tuple[str, str], ...]:
        """(name, version), as the manifest records them."""
        ptxas = ((f"ptxas for {arch}", full) for arch, full in sorted(self.ptxas.items()))
        return (("ouro-build", self.ouro_build), ("torch", self.torch), ("triton", self.triton), *ptxas)

    def ptxas_release(self, arch: str) -> str:
        """CUDA release of the ptxas for `arch`: 13.4 of 13.4.59."""
        return ".".join(self.ptxas[arch].split(".")[:2])


def find_toolchain(parts: Sequence[Part]) -> Toolchain:
    """The installed toolchain.

    Raises MissingExtraError if torch or triton is not installed, CompileError if ptxas is too old for one of `parts`.
    """
    triton, torch = _required("triton"), _required("torch")
    said = _ptxas_versions(sorted({part.capability for part in parts}))
    ptxas = {part.arch: _checked(part, said[str(part.capability)], triton) for part in parts}
    return Toolchain(version("ouro-build"), triton, torch, ptxas)


def clean_environment() -> dict[str, str]:
    """The part of this process's environment that a compiler may see: none of it changes what is compiled."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def _required(package: str) -> str:
    try:
        found = version(package) if find_spec(package) else None
    except PackageNotFoundError:
        found = None
    if found is None:
        raise MissingExtraError(
            f"{package} is not installed, and building needs it", hint="Install it with: pip install 'ouro-build[build]'"
        )
    return found


def _ptxas_versions(capabilities: Sequence[int]) -> dict[str, str]:
    """What `ptxas --version` prints, by capability."""
    command = [sys.executable, "-P", "-c", _ASK, *map(str, capabilities)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"its ptxas cannot be run:\n{done.stderr.strip()}", where="triton", hint="Install triton again.")
    return msgspec.json.decode(done.stdout, type=dict[str, str])


def _checked(part: Part, said: str, triton: str) -> str:
    """The full version in `said`, if that ptxas knows `part`."""
    found = _RELEASE.search(said)
    if found is None:
        raise CompileError(f"ptxas does not tell its version: {said!r}", where="triton", hint="Install triton again.")
    needed = _FIRST_CUDA[part.arch]
    if (int(found[1]), int(found[2])) < needed:
        raise CompileError(
            f"triton {triton} brings ptxas {found[3]}; {part.arch} needs {needed[0]}.{needed[1]} or newer",
            where=f"--gpu {part.name}",
            hint="Install a newer triton, or leave this GPU out.",
        )
    return found[3]
