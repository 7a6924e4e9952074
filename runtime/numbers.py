"""Lists of numbers as people write them on a command line."""

from __future__ import annotations

from ouro_build.artifacts.errors import UsageError


def numbers(text: str, flag: str) -> list[int]:
    """The numbers of `text`, such as 1,8, each once. Raises UsageError."""
    try:
        found = [int(item) for item in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers", where=flag, hint=f"Write it like {flag} 1,8") from error
    return list(dict.fromkeys(found))


def positive_numbers(text: str, flag: str) -> list[int]:
    """As `numbers`, all of them at least 1."""
    found = numbers(text, flag)
    if min(found) < 1:
        raise UsageError(f"{min(found)} is less than 1", where=flag, hint=f"Write it like {flag} 1,8")
    return found


def check_range(value: int, most: int, flag: str, build: str, what: str = "") -> None:
    """Raise UsageError unless `value`, given by `flag`, is in 1 … `most`; a build with `build` would allow more.

    `what` says what is meant where the flag does not, as in `a context of `.
    """
    if not 1 <= value <= most:
        hint = f"Give at most {most}, or build with {build}." if value > most else "Give at least 1."
        raise UsageError(f"{what}{value} is outside 1 … {most}", where=flag, hint=hint)
