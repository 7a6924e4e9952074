"""An executor that is made only when it is first needed."""

from __future__ import annotations

from collections.abc import Callable

from ouro_build.artifacts.plan import ProgramKey
from ouro_build.runtime.executor import Executor, ExecutorName


class LateReference:
    """The reference for keys that nothing else has: importing torch takes seconds, and most workers never need it.

    `make` gives None where torch, or its CUDA, is missing; `wanted` says which keys are worth asking it for.
    """

    name: ExecutorName = "reference"

    def __init__(self, make: Callable[[], Executor | None], wanted: Callable[[ProgramKey], bool]) -> None:
        self._make = make
        self._wanted = wanted
        self._made: list[Executor | None] = []

    def has(self, key: ProgramKey) -> bool:
        if not self._wanted(key):
            return False
        executor = self._executor()
        return executor is not None and executor.has(key)

    def run(self, key: ProgramKey) -> None:
        executor = self._executor()
        if executor is None or not executor.has(key):
            raise ValueError(f"nothing here runs {key}: ask `has` first")
        executor.run(key)

    def close(self) -> None:
        for executor in self._made:
            if executor is not None:
                executor.close()
        self._made = [None]

    def _executor(self) -> Executor | None:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]
