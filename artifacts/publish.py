"""Atomic publishing of a folder: under its final name there is a complete one, or nothing.

A build writes into a hidden sibling, `.NAME.partial-<random>`, and renames it when it is complete and on disk. While the
build lives it holds a lock (`flock`) on a file beside that folder, in which it says who it is; a killed build's file is
unlocked, and the next build of the same output removes both, on whatever machine. Builds of one output at once do not wait
for each other: without `force` the first to finish wins and the others are refused; with `force` the last one wins.

An existing output is exchanged with the new one in one step where the system can (Linux, `renameat2`), so that one of them
is always there. Elsewhere it is moved aside first: for that moment nothing is under the name, and never a part of one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ouro_build.artifacts.errors import OutputError
from ouro_build.artifacts.manifest import MANIFEST
from ouro_build.artifacts.places import check_outside

FOLDER_MODE = 0o755
FILE_MODE = 0o444
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EXISTS = (errno.EEXIST, errno.ENOTEMPTY)
_LOCK = ".lock"
_ASIDE = ".aside"
_OWNER_LENGTH = 200
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def publishing(output: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a folder to write into; publish it as `output` when the block ends, or remove it if the block raises.

    Raises OutputError if `output` exists and is not to be replaced (before and after the block), if its parent cannot be
    written, or if the disk is full.
    """
    check_output(output, force=force)
    output = output.absolute()
    others = _remove_leftovers(output)
    staging, lock = _stage(output)
    try:
        yield staging
        _settle(staging)
        with _naming_others(output, staging, others):
            check_output(output, force=force)
            _publish(staging, output, force=force)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OutputError(
            "the disk is full", where=str(output), hint="Free some space, or choose another place with -o."
        ) from error
    finally:
        # What is here now is the unfinished artifact, or the one that was replaced, or nothing.
        _release(staging, lock)


def check_output(output: Path, *, force: bool) -> None:
    """Raise OutputError if `output` cannot be published, UsageError if it is to lie in another artifact.

    `force` lets an artifact or an empty folder be replaced.
    """
    where = str(output)
    check_outside(output, where)
    if not output.absolute().parent.is_dir():
        raise OutputError("the folder it is to be in does not exist", where=where, hint="Create it first.")
    found = _status(output)
    if found is None:
        return
    if not force:
        raise OutputError("exists already", where=where, hint="Replace it with --force, or choose another name with -o.")
    if not stat.S_ISDIR(found.st_mode):
        raise OutputError("exists and is no folder: not replaced", where=where, hint="Choose another name with -o.")
    if _is_other_folder(output):
        raise OutputError("exists and is no artifact: not replaced", where=where, hint="Choose another name with -o.")


def _status(path: Path) -> os.stat_result | None:
    """What is under this name, a link being a link; None if nothing is."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _is_other_folder(output: Path) -> bool:
    """Whether `output` is a folder with files that are no artifact."""
    while before := _status(output):
        with suppress(FileNotFoundError):
            other = not (output / MANIFEST).is_file() and bool(os.listdir(output))
            # Another build may have replaced the artifact meanwhile and be removing it: then what was seen says nothing.
            if os.path.samestat(before, output.lstat()):
                return other
    return False


def _prefix(output: Path) -> str:
    return f".{output.name}.partial-"


def _stage(output: Path) -> tuple[Path, int]:
    """A new folder beside `output`, and the lock that it is held by."""
    while True:
        path = output.with_name(_prefix(output) + secrets.token_hex(8))
        try:
            lock = _lock(path, os.O_EXCL)
            if lock is None:
                continue  # another build took the new lock file for a leftover before it was locked
            try:
                os.write(lock, f"pid {os.getpid()} on {platform.node()}\n".encode())
                path.mkdir(FOLDER_MODE)
                path.chmod(FOLDER_MODE)  # whatever the umask
            except BaseException:
                _release(path, lock)
                raise
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", where=str(output)) from error
        return path, lock


def _lock_file(staging: Path) -> Path:
    return staging.with_name(staging.name + _LOCK)


def _lock(staging: Path, flags: int = 0) -> int | None:
    """Hold the lock of the folder `staging`, or None if someone else holds it or is removing it. Raises OSError.

    The lock is a file of its own, open for writing: network file systems lock no folder, and nothing that is only read.
    """
    path = _lock_file(staging)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644)
    held = False
    try:
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The name may by now stand for another file than the one that was opened.
            held = os.path.samestat(os.fstat(lock), os.lstat(path))
    except OSError as error:
        if error.errno != errno.ESTALE:  # what a network file system says of a file that another machine has removed
            raise
    finally:
        if not held:
            os.close(lock)
    return lock if held else None


def _release(staging: Path, lock: int) -> None:
    """Remove what the holder of `lock` has beside the output, the lock last."""
    shutil.rmtree(staging, ignore_errors=True)
    with suppress(OSError):
        _lock_file(staging).unlink()
    os.close(lock)


def _remove_leftovers(output: Path) -> dict[Path, str]:
    """Remove what killed builds of `output` left: what nobody has locked. Returns the other builds, with who they are."""
    prefix, live = _prefix(output), {}
    names = {n.removesuffix(_LOCK).removesuffix(_ASIDE) for n in os.listdir(output.parent) if n.startswith(prefix)}
    for staging in map(output.with_name, sorted(names)):
        with suppress(OSError):
            lock = _lock(staging)
            if lock is None:
                live[staging] = _owner(staging)
            else:
                _settle_aside(staging.with_name(staging.name + _ASIDE), output)
                _release(staging, lock)
    return live


def _settle_aside(aside: Path, output: Path) -> None:
    """Bring back what a killed build had moved aside, if nothing has taken its place; else remove it."""
    if not (aside / MANIFEST).is_file() or not _rename(aside, output):
        shutil.rmtree(aside, ignore_errors=True)


def _owner(staging: Path) -> str:
    """Who holds the lock of `staging`, as it says; empty if it does not say."""
    with suppress(OSError), _lock_file(staging).open(encoding="utf-8", errors="replace") as file:
        return "".join(c for c in file.readline(_OWNER_LENGTH) if c.isprintable())
    return ""


@contextmanager
def _naming_others(output: Path, own: Path, before: dict[Path, str]) -> Iterator[None]:
    """Let an OutputError say which other builds of `output` there are, or were when this one began."""
    try:
        yield
    except OutputError as error:
        builds = dict(before)
        with suppress(OSError):
            builds |= _remove_leftovers(output)
        others = dict.fromkeys(owner for staging, owner in builds.items() if owner and staging != own)
        if not others:
            raise
        what = f"{error.what}; it was being built also by {', '.join(others)}"
        raise OutputError(what, where=error.where, hint=error.hint) from error


def _settle(staging: Path) -> None:
    """Give every file and folder its mode, and wait until they are on disk."""
    for folder, _, files in os.walk(staging, topdown=False):
        for name in files:
            Path(folder, name).chmod(FILE_MODE)
            _sync(Path(folder, name))
        Path(folder).chmod(FOLDER_MODE)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _publish(staging: Path, output: Path, *, force: bool) -> None:
    while not _rename(staging, output):
        if not force:
            check_output(output, force=False)
        elif _exchange(staging, output) or _swap(staging, output):
            break
    _sync(output.parent)


def _rename(source: Path, target: Path) -> bool:
    """Rename over nothing or an empty folder; False if there is a folder with files, which a rename never replaces."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in _EXISTS:
            return False
        raise
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot, or one has gone."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return done == 0


def _swap(staging: Path, output: Path) -> bool:
    """Exchange in two steps: the old one is moved aside, then removed. False if another build came in between."""
    aside = staging.with_name(staging.name + _ASIDE)
    with suppress(FileNotFoundError):
        output.rename(aside)
    try:
        done = _rename(staging, output)
    except OSError:
        with suppress(OSError):
            aside.rename(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return done
