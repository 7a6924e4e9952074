import errno
import fcntl
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from ouro_build.artifacts import publish
from ouro_build.artifacts.errors import OutputError
from ouro_build.artifacts.publish import publishing

FILES = 8

# Publishes, again and again until it is killed or the given number of times, folders whose files all hold one number.
# Without waiting for the disk, so that a kill meets every other moment too: a killed process loses nothing it has written.
CHILD = f"""
import os, sys
os.fsync = lambda file: None
from pathlib import Path
from ouro_build.artifacts.errors import OutputError
from ouro_build.artifacts.publish import publishing
output, first, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for number in range(first, first + times):
    try:
        with publishing(output, force="force" in sys.argv) as folder:
            (folder / "sub").mkdir()
            for i in range({FILES}):
                (folder / "sub" / str(i)).write_text(str(number))
            (folder / "manifest.json").write_text(str(number))
    except OutputError as error:
        sys.exit("refused: " + error.what)
"""


def start(output: Path, first: int, times: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(output), str(first), str(times), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_start(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"


def number_in(output: Path) -> int | None:
    """The number that the whole folder holds, read through one handle: it is complete, and of one build.

    None if there is no folder, or it was replaced, and so removed, meanwhile.
    """
    try:
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        (number,) = {_read(handle, name) for name in ("manifest.json", *(f"sub/{i}" for i in range(FILES)))}
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            assert not os.path.samestat(os.fstat(handle), os.stat(output))
        return None
    finally:
        os.close(handle)
    return int(number)


def _read(folder: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
        return file.read()


def hidden(folder: Path) -> list[str]:
    return [n for n in os.listdir(folder) if n.startswith(".")]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out.ouro"
    assert hidden(tmp_path) == []


def fill(folder: Path, text: str = "new") -> None:
    (folder / "manifest.json").write_text(text)


def published(output: Path, text: str = "new", *, force: bool = False) -> None:
    with publishing(output, force=force) as folder:
        fill(folder, text)


def test_publishes_with_fixed_modes(output: Path) -> None:
    before = os.umask(0o077)
    try:
        with publishing(output) as folder:
            assert not output.exists()
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text("x")
            fill(folder)
    finally:
        os.umask(before)
    modes = {p.relative_to(output).as_posix(): p.stat().st_mode & 0o777 for p in output.rglob("*")}
    assert modes == {"sub": 0o755, "sub/file": 0o444, "manifest.json": 0o444}
    assert output.stat().st_mode & 0o777 == 0o755


def test_existing_output_needs_force(output: Path) -> None:
    published(output, "old")
    with pytest.raises(OutputError, match="exists already\nReplace it with --force"):
        published(output)
    assert (output / "manifest.json").read_text() == "old"
    published(output, force=True)
    assert (output / "manifest.json").read_text() == "new"


def test_output_that_appears_meanwhile_is_kept(output: Path) -> None:
    def build() -> None:
        with publishing(output) as folder:
            fill(folder)
            published(output, "first")

    with pytest.raises(OutputError, match="exists already"):
        build()
    assert (output / "manifest.json").read_text() == "first"


def test_only_an_artifact_is_replaced(output: Path, tmp_path: Path) -> None:
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="no artifact: not replaced"):
        published(output, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="no folder: not replaced"):
        published(tmp_path / "file", force=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="no folder: not replaced"):
        published(tmp_path / "link", force=True)
    with pytest.raises(OutputError, match="does not exist"):
        published(tmp_path / "no" / "out.ouro")
    assert (output / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), OSError(errno.EIO, "x")])
def test_a_failing_build_leaves_nothing(output: Path, error: BaseException) -> None:
    def build() -> None:
        with publishing(output) as folder:
            fill(folder)
            raise error

    with pytest.raises(type(error)):
        build()
    assert not output.exists()


def test_full_disk(output: Path) -> None:
    def build() -> None:
        with publishing(output) as folder, Path("/dev/full").open("wb") as full:
            fill(folder)
            full.write(b"x")

    with pytest.raises(OutputError, match="the disk is full"):
        build()
    assert not output.exists()


def test_without_an_exchange_the_old_one_is_moved_aside(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
    published(output, "old")
    published(output, force=True)
    assert (output / "manifest.json").read_text() == "new"


def test_without_an_exchange_a_failure_brings_the_old_one_back(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(output, "old")
    real, failed = publish._rename, []

    def rename(source: Path, target: Path) -> bool:
        if output.exists():
            return real(source, target)
        failed.append(source)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(publish, "_exchange", lambda a, b: False)
    monkeypatch.setattr(publish, "_rename", rename)
    with pytest.raises(OSError, match="broken"):
        published(output, force=True)
    assert failed
    assert (output / "manifest.json").read_text() == "old"


def test_what_a_killed_build_had_moved_aside_comes_back(output: Path, tmp_path: Path) -> None:
    """Killed between the two renames of an exchange in two steps: the old artifact has no other name."""
    published(output, "old")
    output.rename(tmp_path / ".out.ouro.partial-0123.aside")
    (tmp_path / ".out.ouro.partial-0123.lock").write_text("pid 1 on nowhere\n")
    (tmp_path / ".out.ouro.partial-0123").mkdir()
    with pytest.raises(OutputError, match="exists"):
        published(output, "new")
    assert (output / "manifest.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.ouro"]


def test_leftovers_go_and_live_builds_stay(output: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.ouro.partial-0123").mkdir()
    (tmp_path / ".out.ouro.partial-0123" / "big").write_text("x")
    (tmp_path / ".out.ouro.partial-4567.lock").write_text("pid 1 on nowhere\n")
    (tmp_path / ".out.ouro.partial-89ab").mkdir()
    (tmp_path / ".out.ouro.partial-89ab.lock").touch()
    (tmp_path / ".out.ouro.partial-89ab.aside").mkdir()
    (tmp_path / ".other.ouro.partial-0123").mkdir()
    with publishing(output) as live:
        fill(live)
        assert set(hidden(tmp_path)) == {".other.ouro.partial-0123", live.name, live.name + ".lock"}
        with pytest.raises(ValueError, match="stop"), publishing(output):
            raise ValueError("stop")
        assert (live / "manifest.json").exists()
    assert os.listdir(output) == ["manifest.json"]
    (tmp_path / ".other.ouro.partial-0123").rmdir()


def test_a_new_lock_file_taken_for_a_leftover_is_made_again(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build starts between the making of the lock file and its locking."""
    real = fcntl.flock
    taken: list[str] = []

    def flock(file: int, how: int) -> None:
        if len(taken) < 2:
            taken.extend(hidden(output.parent))
            monkeypatch.setattr(fcntl, "flock", real)
            publish._remove_leftovers(output)
            monkeypatch.setattr(fcntl, "flock", flock)
            assert hidden(output.parent) == []
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    published(output)
    assert len(set(taken)) == 2
    assert all(name.endswith(".lock") for name in taken)
    assert (output / "manifest.json").read_text() == "new"


def test_a_lock_file_that_another_machine_has_removed_is_made_again(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, stale = fcntl.flock, [errno.ESTALE, errno.ESTALE]

    def flock(file: int, how: int) -> None:
        if stale:
            (output.parent / hidden(output.parent)[0]).unlink()
            raise OSError(stale.pop(), "stale")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    published(output)
    assert stale == []


def test_the_lock_is_a_writable_file_that_says_who_holds_it(output: Path) -> None:
    """As network file systems need; what holds another's lock is seen as any other machine sees it: by the lock alone."""
    with publishing(output) as live:
        fill(live)
        lock = live.with_name(live.name + ".lock")
        assert lock.read_text() == f"pid {os.getpid()} on {platform.node()}\n"
        with lock.open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert list(publish._remove_leftovers(output)) == [live]
        assert live.is_dir()
    assert not lock.exists()


def test_leftovers_go_where_nothing_can_be_written(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk it is they who fill it."""
    (tmp_path / ".out.ouro.partial-0123").mkdir()
    (tmp_path / ".out.ouro.partial-0123.lock").touch()

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match="cannot be written: full"):
        published(output)


# Builds an output until it is told to publish it.
HOLDER = """
import sys
from pathlib import Path
from ouro_build.artifacts.publish import publishing
with publishing(Path(sys.argv[1])) as folder:
    (folder / "manifest.json").write_text("theirs")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def held(output: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(output)], stdin=pipe, stdout=pipe, text=True)
    await_start(child)
    return child


def test_the_loser_is_told_who_was_building_before_it(output: Path) -> None:
    def build() -> None:
        with publishing(output) as folder:
            fill(folder)
            child.communicate("publish\n")

    child = held(output)
    who = f"pid {child.pid} on {platform.node()}"
    with pytest.raises(OutputError, match=f"exists already; it was being built also by {who}\n"):
        build()
    assert (output / "manifest.json").read_text() == "theirs"


def test_the_loser_is_told_who_is_building_still(output: Path) -> None:
    def build() -> None:
        with publishing(output) as folder:
            fill(folder)
            children.append(held(output))
            published(output, "first")

    children: list[subprocess.Popen[str]] = []
    with pytest.raises(OutputError, match="exists already; it was being built also by ") as caught:
        build()
    children[0].kill()
    children[0].communicate()
    assert f"by pid {children[0].pid} on {platform.node()}\n" in str(caught.value)
    assert (output / "manifest.json").read_text() == "first"
    published(output, force=True)


def test_an_output_replaced_while_it_is_looked_at_is_looked_at_again(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(output, "old")
    real, before = os.listdir, output.with_name("before")

    def listdir(path: Path) -> list[str]:
        if path == output and not before.exists():
            # Another build has exchanged it and already removed the old one's manifest.
            output.rename(before)
            (before / "manifest.json").rename(before / "part")
            published(output, "other")
            return ["part"]
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != "manifest.json" or before.exists())
    publish.check_output(output, force=True)
    assert before.exists()
    assert (output / "manifest.json").read_text() == "other"


@pytest.fixture(params=[True, False], ids=["exchange", "swap"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the children exchange an existing output in one step; where not, as on other systems, in two."""
    found: bool = request.param
    if not found:
        monkeypatch.setattr(sys.modules[__name__], "CHILD", CHILD.replace("sys\n", "sys\nsys.platform = 'elsewhere'\n", 1))
    return found


def test_killed_at_any_moment(output: Path, exchange: bool) -> None:
    """Two builds that replace one output without end, killed 30 times: a reader never sees anything but a whole one."""
    moments = random.Random(1)
    seen = set()
    kills = 30 if exchange else 6
    for first in range(0, 1000 * kills, 2000):
        children = [start(output, first + i * 1000, 1000, "force") for i in range(2)]
        for child in children:
            await_start(child)
        for child in children:
            time.sleep(moments.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
            child.wait()
            close(child)
            seen.add(number_in(output))
    assert len(seen) > 4
    published(output, force=True)
    assert (output / "manifest.json").read_text() == "new"


def test_two_at_once_without_force(output: Path) -> None:
    children = [start(output, n, 1) for n in (1, 2)]
    results = [child.communicate()[1] for child in children]
    assert sorted(r == "" for r in results) == [False, True]
    assert any("refused: exists already" in r for r in results)
    assert number_in(output) == 1 + results.index("")


@pytest.mark.usefixtures("exchange")
def test_two_at_once_with_force(output: Path) -> None:
    children = [start(output, first, 99, "force") for first in (100, 200)]
    seen = set()
    while any(child.poll() is None for child in children):
        seen.add(number_in(output))
    assert [child.communicate()[1] for child in children] == ["", ""]
    assert number_in(output) in (198, 298)
    assert len(seen) > 2


def close(child: subprocess.Popen[str]) -> None:
    stream: IO[str] | None
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
