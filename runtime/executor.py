"""What the three executors have in common."""

from __future__ import annotations

from typing import Literal, Protocol

from ouro_build.artifacts.plan import ProgramKey

ExecutorName = Literal["graph", "launch", "reference"]


class Executor(Protocol):
    """Runs recorded programs over a worker's pools, in submission order."""

    name: ExecutorName
    """`graph`, `launch` or `reference`: the word in records and on the command line."""

    def has(self, key: ProgramKey) -> bool:
        """Whether this executor can run `key`: a graph's key for `graph`, a plan's for the others."""

    def run(self, key: ProgramKey) -> None:
        """Submit one run of `key`. Raises DeviceError naming the key if it cannot be submitted."""

    def close(self) -> None:
        """Release what the executor made."""
