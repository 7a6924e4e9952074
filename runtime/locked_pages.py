"""Pages of the host locked for a device, a piece at a time.

Locking, and unlocking, holds the address space of the process and the driver: all at once, gigabytes would keep imports
waiting for a tenth of a second, and steps for half as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

PIECE = 256 << 20
"""Bytes locked at once, in about 15 ms on an H200's host; a copy must lie in one piece. Smaller pieces take longer in all, as
other threads come in between."""


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the pieces of `size` bytes."""
    return ((start, min(PIECE, size - start)) for start in range(0, size, PIECE))


class LockedPages:
    """Locked pieces, none at first.

    `lock` takes the address and bytes of a piece, and says whether it could; `unlock` takes its address.
    """

    def __init__(self, lock: Callable[[int, int], bool], unlock: Callable[[int], None]) -> None:
        self._lock, self._unlock = lock, unlock
        self._addresses: list[int] = []

    def lock(self, address: int, size: int) -> bool:
        """Lock `size` bytes from `address`; False, with nothing locked, if a piece of them cannot be."""
        try:
            for offset, piece in pieces(size):
                if not self._lock(address + offset, piece):
                    self.unlock()
                    return False
                self._addresses.append(address + offset)
        except BaseException:
            self.unlock()
            raise
        return True

    def unlock(self, between: Callable[[], object] = lambda: None) -> None:
        """Unlock all that is still locked; `between` is called after each piece."""
        while self._addresses:
            self._unlock(self._addresses.pop())
            between()
