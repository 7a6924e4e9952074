"""Compiled images kept between builds, by content: source, specialisation, architecture and compiler versions.

A cache only saves time. An artifact made with an empty one and with a full one are the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from ouro_build import kernels
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.plan import Specialization
from ouro_build.builder.toolchain import Toolchain
from ouro_build.kernels import registry

ENTRY_FORMAT = 2
"""Part of every key: raised when what an entry holds, or how images are compiled or checked, changes."""
_ROOT = "ouro_build.kernels."


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A compiled kernel. `registers` and `spills` (bytes) are a thread's, `shared` (bytes) a block's."""

    cubin: bytes
    function: str
    registers: int
    spills: int
    shared: int
    parameters: tuple[tuple[int, int], ...]


class ImageCache:
    """A folder of images. Entries are written atomically; a damaged one counts as absent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str) -> Image | None:
        """The image stored under `key`, or None."""
        try:
            raw = self._path(key).read_bytes()
        except OSError:
            return None
        digest, body = raw[:32], raw[32:]
        if hashlib.sha256(body).digest() != digest:
            return None
        try:
            return msgspec.msgpack.decode(body, type=Image)
        except msgspec.MsgspecError:
            return None

    def put(self, key: str, image: Image) -> None:
        """Store `image`. A cache that cannot be written is no reason to fail: the image is in hand."""
        body = msgspec.msgpack.encode(image)
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, hashlib.sha256(body).digest() + body)
        except OSError:
            return

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key[2:]


def default_folder() -> Path:
    """`ouro-build` in the user's cache folder. Raises UsageError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ouro-build"
    except RuntimeError as error:
        raise UsageError(
            "this user has no home folder", where="--cache-dir", hint="Name a folder for compiled images."
        ) from error


def image_key(specialization: Specialization, arch: str, toolchain: Toolchain) -> str:
    """sha256, in hex, of everything that decides the bytes of an image and whether it is accepted.

    The carve-out that launches prefer is no part of it.
    """
    parts = {
        "format": ENTRY_FORMAT,
        "source": source_digest(f"{_ROOT}{specialization.kernel}.source"),
        "specialization": specialization.compiled(),
        "weights": registry.kernel(specialization.kernel).weights,
        "early": registry.kernel(specialization.kernel).early,
        "arch": arch,
        "triton": toolchain.triton,
        "ptxas": toolchain.ptxas[arch],
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


@cache
def source_digest(module: str) -> str:
    """sha256 of the text of `module` and of every kernel module that it imports, directly or not. Imports none of them."""
    texts: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if path is None or name in texts:
            continue  # a name imported from a module is no module itself
        texts[name] = path.read_bytes()
        waiting += _imports(texts[name])
    if module not in texts:
        raise ValueError(f"there is no kernel module {module}")
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _file(module: str) -> Path | None:
    """The file of a kernel module, if it is one."""
    stem = Path(kernels.__file__).parent.joinpath(*module.removeprefix(_ROOT).split("."))
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)


def _imports(text: bytes) -> Iterator[str]:
    """Kernel modules that a source imports; imports are absolute throughout the project."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(_ROOT))
        elif isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(_ROOT):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _replace(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, then give it the name: readers see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
