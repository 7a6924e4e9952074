"""What of a worker's start has begun before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ouro_build.runtime.opening import OpeningDriver
from ouro_build.runtime.startup import StartupClock

if TYPE_CHECKING:
    from ouro_build.runtime.chunk_hashes import ChunkHashes


class Start(NamedTuple):
    """The clock; CUDA, being opened; and the weights of the artifact, being hashed: None for what has not begun."""

    clock: StartupClock
    opening: OpeningDriver | None = None
    hashes: ChunkHashes | None = None

    def close(self) -> None:
        """Give back what has begun, whether a worker has taken it over and closed it or not."""
        if self.opening is not None:
            self.opening.wait()  # it may begin to lock the file's pages
        if self.hashes is not None:
            self.hashes.close()
        if self.opening is not None:
            self.opening.close()
