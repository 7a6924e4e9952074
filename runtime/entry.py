"""Where `ouro-worker` starts: the clock, CUDA on a thread, the weights' digests on others, then all that is imported.

What the functions need they import themselves: `main` has interrupts end the process before that.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from ouro_build.runtime.start import Start
    from ouro_build.runtime.startup import StartupClock

LOADING = ("run", "selftest")
"""Commands that load a worker."""
_SWITCH = 0.0005


def device_of(arguments: Sequence[str]) -> int | None:
    """The CUDA device that a command line asks for; None if it loads no worker, or if that is not plain."""
    if not arguments or arguments[0] not in LOADING or "--help" in arguments:
        return None
    words = _words(arguments)
    if "--device" not in words:
        return 0
    if words.count("--device") > 1:
        return None
    value = words[words.index("--device") + 1 :][:1]
    return int(value[0]) if value and value[0].isdecimal() else None


def weights_of(arguments: Sequence[str]) -> str | None:
    """The file of weights that a command line is going to have checked; None if there is none, or if that is not plain.

    It only says what to begin with: what is loaded, and what its digests must be, is decided by who reads all of the line.
    """
    from ouro_build.artifacts.chunks import WEIGHTS

    words = _words(arguments)
    if device_of(arguments) is None or "--weights" in words or "fast" in words:
        return None
    found = (os.path.join(word, WEIGHTS) for word in words[1:] if not word.startswith("-"))
    return next((path for path in found if os.path.isfile(path)), None)


def main() -> NoReturn:
    """Entry point of `ouro-worker`.

    Until the command runs, an interrupt ends the process at once, and without a word: there is nothing to be cleaned up.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever started it wants them ignored
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from contextlib import suppress
    from importlib import import_module

    from ouro_build.runtime.driver import BINDINGS
    from ouro_build.runtime.startup import StartupClock

    clock = StartupClock(first="interpreter")
    # Threads that hash or copy take the interpreter only between chunks, and should not wait 5 ms for it each time.
    sys.setswitchinterval(_SWITCH)
    gc.disable()  # nothing that is imported is garbage
    start = begin(sys.argv[1:], clock)
    try:
        if start.opening is not None:
            with suppress(ImportError):  # told by the thread that opens CUDA, which is going to want them
                import_module(BINDINGS)
        from ouro_build.runtime.cli import main as command

        gc.freeze()
        gc.enable()
        clock.until_now("imports")
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(start)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        start.close()


def begin(arguments: Sequence[str], clock: StartupClock) -> Start:
    """Begin what the command line is going to need."""
    from ouro_build.runtime.opening import OpeningDriver
    from ouro_build.runtime.start import Start

    device, weights = device_of(arguments), weights_of(arguments)
    opening = None if device is None else OpeningDriver(device, clock, early=True)
    if weights is None:
        return Start(clock, opening)
    from ouro_build.runtime.chunk_hashes import ChunkHashes  # CUDA is under way by now

    began, size = time.monotonic(), os.path.getsize(weights)
    try:
        hashes = ChunkHashes(weights, done=lambda: clock.was_beside("check weights", "", began, size))
    except OSError:  # told where the file is opened
        return Start(clock, opening)
    if opening is not None:
        opening.file = hashes
    return Start(clock, opening, hashes)


def _words(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `--option=value` as two."""
    return "\0".join(arguments).replace("=", "\0").split("\0")


if __name__ == "__main__":
    main()
