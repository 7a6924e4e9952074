"""Debian packages as folders of files: fetched by apt, unpacked without being installed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """An unpacked package: `version` as Debian writes it, `root` holding its files as they would stand under `/`."""

    name: str
    version: str
    root: Path


def unpack(name: str, cache: Path) -> Package:
    """The package `name` below `cache`, fetched where it is not there yet.

    `apt-get update` must have run once. Raises CalledProcessError where apt has no such package.
    """
    archive = _fetched(name, cache) or _fetch(name, cache)
    root = cache / "root" / name
    if not root.is_dir():
        partial = root.with_name(f"{name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
        partial.rename(root)
    version = subprocess.run(["dpkg-deb", "-f", archive, "Version"], check=True, capture_output=True, text=True).stdout
    return Package(name, version.strip(), root)


def _fetched(name: str, cache: Path) -> Path | None:
    return next(iter(sorted((cache / "archives").glob(f"{name}_*.deb"))), None)


def _fetch(name: str, cache: Path) -> Path:
    archives = cache / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "-q", "download", name], cwd=archives, check=True, capture_output=True)
    found = _fetched(name, cache)
    if found is None:
        raise FileNotFoundError(f"apt-get download {name} left no archive in {archives}")
    return found
