"""Where `ouro-build` and `ouro-artifact` start: an interrupt while they are imported ends the process without a word."""

from __future__ import annotations

import signal
from importlib import import_module


def build() -> None:
    """Entry point of `ouro-build`."""
    _run("ouro_build.builder.cli")


def artifact() -> None:
    """Entry point of `ouro-artifact`."""
    _run("ouro_build.builder.artifact_cli")


def _run(module: str) -> None:
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever started it wants them ignored
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = import_module(module).main
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
