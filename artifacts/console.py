"""What every command shares: data to stdout, talk to stderr, one way to print an error, one table of exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import click
import msgspec

from ouro_build.artifacts.errors import MissingExtraError, OuroError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERRUPTED = 130
_PIPE_WIDTH = 160


class Output:
    """A command's sink. With `json`, data is one JSON document on stdout; otherwise it is drawn for people."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json

    def data(self, value: Any, draw: Callable[[Any], RenderableType]) -> None:
        """Print the command's result, `value` (anything msgspec can encode): as JSON, or as `draw` shows it."""
        if self.json:
            # Bytes: JSON is UTF-8 whatever the locale.
            sys.stdout.flush()
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        elif isinstance(drawn := draw(value), str):
            sys.stdout.write(drawn + "\n")
        else:
            rich_console(sys.stdout).print(drawn)
        sys.stdout.flush()

    def say(self, message: str) -> None:
        """Tell people something, on stderr."""
        click.echo(message, err=True)


def rich_console(stream: TextIO) -> Console:
    """A console that prints text as it is: no markup, no guessed colours, lines of a fixed length into a pipe."""
    from rich.console import Console  # costs 30 ms, which a worker's start does not spend

    return Console(file=stream, markup=False, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)


def require_extra(extra: str, modules: tuple[str, ...], command: str) -> None:
    """Raise MissingExtraError unless all `modules` of `extra` can be imported."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{command} needs {', '.join(missing)}",
            hint=f"Install the extra that brings it: pip install 'ouro-build[{extra}]'",
        )


def run(command: click.Command, arguments: list[str] | None = None, *, obj: object = None) -> NoReturn:
    """Run a click command, whose context has `obj`, and leave the process with its exit code: an int that it returns, else that
    of its error.

    A request to terminate ends the command as an interrupt does, so that nothing is left behind. What the terminal's
    encoding lacks is printed as an escape, and what is printed to a stream that was closed is lost.
    """
    # Python has no stream there, and a file that is opened later would take the number of stdout.
    sys.stdin, sys.stdout, sys.stderr = sys.stdin or _nowhere("r"), sys.stdout or _nowhere("w"), sys.stderr or _nowhere("w")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(exit_code(command, arguments, obj=obj))


def _nowhere(mode: str) -> TextIO:
    """Where what is printed is lost, and nothing is to be read."""
    return cast(TextIO, open(os.devnull, mode))


def exit_code(command: click.Command, arguments: list[str] | None = None, *, obj: object = None) -> int:
    """Run a click command; print its error, if any, to stderr, and return the exit code."""
    try:
        result = command.main(arguments, standalone_mode=False, obj=obj)
    except OuroError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except OSError as error:
        click.echo(f"error: {error.filename or 'input or output'}: {error.strerror}", err=True)
        return 1
    return result if isinstance(result, int) else 0
