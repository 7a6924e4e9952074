"""The commands' first half second."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import os, signal, sys
from ouro_build.builder import entry

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["--help"]
entry.{command}()
"""


@pytest.mark.parametrize("command", ["build", "artifact"])
@pytest.mark.parametrize("module", ["ouro_build.artifacts.errors", "click"])
def test_an_interrupt_of_the_imports_ends_the_process_without_a_word(command: str, module: str) -> None:
    code = INTERRUPTED.format(module=module, command=command)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    # A process that is started to ignore interrupts, as by nohup, goes on.
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{code}"
    done = subprocess.run([sys.executable, "-P", "-c", ignoring], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage:" in done.stdout
