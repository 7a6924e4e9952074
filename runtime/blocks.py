"""Which KV blocks are free."""

from __future__ import annotations

from ouro_build.artifacts.errors import RequestError


class BlockPool:
    """Hands out KV blocks by number. A block is any request's, one at a time."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that can still be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks. Raises RequestError, and takes none, if there are fewer."""
        if count > len(self._free):
            raise RequestError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give(self, blocks: list[int]) -> None:
        """Return blocks that were taken."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"KV block {block} was not taken")
            self._used.discard(block)
            self._free.append(block)
