"""Where `ouro-worker` starts: the clock, then CUDA on a thread of its own, then everything that has to be imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple, NoReturn

from ouro_build.runtime.driver import BINDINGS
from ouro_build.runtime.opening import OpeningDriver
from ouro_build.runtime.startup import StartupClock

LOADING = ("run", "selftest")
"""Commands that load a worker."""
_SWITCH = 0.0005


class Start(NamedTuple):
    """What has begun when a command is called: the clock, and CUDA if the command is going to need it."""

    clock: StartupClock
    opening: OpeningDriver | None


def device_of(arguments: Sequence[str]) -> int | None:
    """The CUDA device that a command line asks for; None if it loads no worker, or if that is not plain."""
    if not arguments or arguments[0] not in LOADING or "--help" in arguments:
        return None
    joined = "\0".join(arguments).replace("--device=", "--device\0").split("\0")
    if "--device" not in joined:
        return 0
    value = joined[joined.index("--device") + 1 :][:1]
    return int(value[0]) if value and value[0].isdecimal() else None


def main() -> NoReturn:
    """Entry point of `ouro-worker`."""
    clock = StartupClock(first="interpreter")
    device = device_of(sys.argv[1:])
    start = Start(clock, None if device is None else OpeningDriver(device, clock, early=True))
    # Threads that hash or copy take the interpreter only between chunks, and should not wait 5 ms for it each time.
    sys.setswitchinterval(_SWITCH)
    gc.disable()  # nothing that is imported is garbage
    try:
        if start.opening is not None:
            with suppress(ImportError):  # told by the thread that opens CUDA, which is going to want them
                import_module(BINDINGS)
        from ouro_build.runtime.cli import main as command

        gc.freeze()
        gc.enable()
        clock.until_now("imports")
        command(start)
    finally:
        if start.opening is not None:
            start.opening.close()


if __name__ == "__main__":
    main()
