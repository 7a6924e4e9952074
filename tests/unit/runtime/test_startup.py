"""The clock of start-up: where time zero is, and that phases account for the time."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ouro_build.runtime import entry
from ouro_build.runtime.startup import TIME_ZERO, StartupClock, process_start


def test_a_parent_says_when_it_started_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    monkeypatch.setenv(TIME_ZERO, repr(before))
    assert process_start() == before
    assert TIME_ZERO not in os.environ, "children would inherit it"
    assert process_start() < before, "without it, the kernel's account of this process"


@pytest.mark.parametrize("said", ["", "soon", "nan", "-1", "1e30"])
def test_a_time_that_cannot_be_is_not_believed(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(TIME_ZERO, said)
    assert 0 < process_start() < time.monotonic()


def test_phases_that_follow_one_another_account_for_all() -> None:
    clock = StartupClock(time.monotonic() - 1, "before")
    with clock.phase("outer"):
        with clock.phase("inner") as phase:
            phase.bytes = 10
            time.sleep(0.03)
        with clock.beside("aside", clock.current):
            pass
    clock.until_now("rest")
    clock.restored(2, 50)
    clock.first_token(time.monotonic())
    record = clock.record()
    assert [(p.name, p.parent, p.beside) for p in record.phases] == [
        ("before", "", False), ("outer", "", False), ("inner", "outer", False), ("aside", "outer", True),
        ("rest", "", False), ("first token", "", False),
    ]  # fmt: skip
    assert 0.995 < record.accounted <= 1.0001
    inner = record.phases[2]
    assert inner.rate == pytest.approx(10 / inner.seconds)
    assert (record.graphs, record.nodes, record.node_us) == (2, 50, 0.0)


def test_a_hole_is_not_accounted_for() -> None:
    clock = StartupClock(time.monotonic(), "before")
    with clock.phase("outer"):
        time.sleep(0.03)
        with clock.phase("inner"):
            pass
    clock.first_token(time.monotonic())
    assert clock.record().accounted < 0.5, "a phase with parts counts by its parts"


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        (["run", "a.ouro"], 0), (["run", "a", "--device", "3"], 3), (["selftest", "--device=2", "a"], 2),
        (["bench", "decode", "a"], None), ([], None), (["run", "--help"], None), (["run", "--device"], None),
        (["run", "--device", "x"], None),
    ],
)  # fmt: skip
def test_cuda_starts_at_once_for_commands_that_need_it(arguments: list[str], device: int | None) -> None:
    assert entry.device_of(arguments) == device


def test_weights_are_hashed_at_once_where_it_is_plain_which(tmp_path: Path) -> None:
    file = tmp_path / "a.ouro" / "weights.safetensors"
    file.parent.mkdir()
    file.write_bytes(bytes(1000))
    art = str(file.parent)
    for plain in (["run", art], ["run", "--prompt", "x", art], ["selftest", "--device=1", art]):
        assert entry.weights_of(plain) == str(file)
    other = str(tmp_path)
    unclear = [
        ["run", other],
        ["run", art, "--weights=x"],
        ["run", art, "--verify", "fast"],
        ["bench", art],
        ["run", art, "--help"],
    ]
    assert [entry.weights_of(arguments) for arguments in unclear] == [None] * len(unclear)
    clock = StartupClock(0.0)
    start = entry.begin(["run", art], clock)
    assert start.hashes is not None
    assert start.hashes.wait() == [hashlib.sha256(bytes(1000)).hexdigest()]
    start.close()
    start.close()
    (checked,) = [p for p in clock.record().phases if p.name == "check weights"]
    assert (checked.parent, checked.beside, checked.bytes) == ("", True, 1000)
    nothing = entry.begin(["inspect"], clock)
    assert (nothing.opening, nothing.hashes) == (None, None)


def test_little_is_imported_before_cuda_starts() -> None:
    """Everything here delays the first call of the driver."""
    code = (
        "import json, sys; from ouro_build.runtime import entry; from ouro_build.runtime.startup import StartupClock\n"
        "entry.begin(['inspect'], StartupClock()); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert not {"numpy", "click", "msgspec", "cuda.bindings.driver", "inspect", "hashlib"} & set(loaded)
    assert {m for m in loaded if m.startswith("ouro_build.")} == {
        "ouro_build.artifacts", "ouro_build.artifacts.chunks", "ouro_build.artifacts.errors", "ouro_build.runtime",
        "ouro_build.runtime.driver", "ouro_build.runtime.entry", "ouro_build.runtime.opening", "ouro_build.runtime.start",
        "ouro_build.runtime.startup",
    }  # fmt: skip


INTERRUPTED = """
import os, signal, sys
from ouro_build.runtime import entry

class Interrupt:
    \"\"\"The terminal's, while {module} is imported.\"\"\"
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["selftest", "nowhere.ouro"]
entry.main()
"""


@pytest.mark.parametrize(
    "module", ["ouro_build.runtime.startup", "ouro_build.runtime.opening", "ouro_build.runtime.cli", "click"]
)
def test_an_interrupt_of_the_imports_ends_the_process_without_a_word(module: str) -> None:
    code = INTERRUPTED.format(module=module)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    # A process that is started to ignore interrupts, as by nohup, goes on.
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{code}"
    done = subprocess.run([sys.executable, "-P", "-c", ignoring], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no such artifact" in done.stderr
