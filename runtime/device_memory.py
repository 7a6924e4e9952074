"""The pools on a device: allocated once, written and read through pinned staging, all on one stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.memory import ALIGNMENT, check_range, doublings

BANK = 4 << 20
"""Bytes of one staging bank."""
BANKS = 4
NON_BLOCKING = 1  # CU_STREAMNON_BLOCKING: no implicit ordering with the legacy default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING: the cheap kind of event
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE


class Staging:
    """A ring of pinned banks through which the host's data reaches the device in stream order.

    Small writes share a bank. An event is recorded when a bank is left and waited for when the ring comes back to it, so
    a write returns as soon as its data is copied, and only a full ring makes it wait.
    """

    def __init__(self, driver: Driver, stream: object, resources: ExitStack, bank: int = BANK, banks: int = BANKS) -> None:
        self._driver = driver
        self._stream = stream
        self._bytes = pinned(driver, bank * banks, resources)
        self._address = int(self._bytes.ctypes.data)
        self._bank = bank
        self._events = [make_event(driver, resources) for _ in range(banks)]
        self._pending = [False] * banks
        self._current = 0
        self._used = 0

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy `data` to device memory at `address`, after the work already submitted."""
        at = 0
        while at < len(data):
            if self._used == self._bank:
                self._next_bank()
            size = min(self._bank - self._used, len(data) - at)
            start = self._current * self._bank + self._used
            self._bytes[start : start + size] = data[at : at + size]
            copy = (address + at, self._address + start, size, self._stream)
            self._driver.call("cuMemcpyHtoDAsync", *copy, doing=f"copying {size} bytes to the device")
            self._used += size
            at += size

    def _next_bank(self) -> None:
        self._driver.call("cuEventRecord", self._events[self._current], self._stream, doing="marking a staging bank")
        self._pending[self._current] = True
        self._current = (self._current + 1) % len(self._events)
        self._used = 0
        if self._pending[self._current]:
            self._driver.call("cuEventSynchronize", self._events[self._current], doing="waiting for a staging bank")
            self._pending[self._current] = False


class _Landed:
    """A piece of a read: on its way into a slot of the ring, then in `out`."""

    def __init__(self, driver: Driver, event: object, slot: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        self._driver = driver
        self._event = event
        self._slot: NDArray[np.uint8] | None = slot
        self._out = out
        self._taken = False

    def take(self) -> None:
        """Wait for the piece and copy it to `out`, unless that was done before."""
        if self._taken:
            return
        if self._slot is None:
            raise DeviceError("the memory was given back before this read was waited for", where="device memory")
        self._driver.call("cuEventSynchronize", self._event, doing=f"waiting for {len(self._out)} bytes from the device")
        self._out[:] = self._slot
        self._taken = True

    def drop(self) -> None:
        """The slot is given back."""
        self._slot = None


class Landing:
    """A ring of pinned slots through which the device's data reaches the host in stream order.

    When the ring comes back to a slot whose piece nobody has taken, the piece is waited for and taken for its reader.
    """

    def __init__(self, driver: Driver, stream: object, resources: ExitStack, slot: int = BANK, slots: int = BANKS) -> None:
        self._driver = driver
        self._stream = stream
        self._slots = pinned(driver, slot * slots, resources).reshape(slots, slot)
        self._events = [make_event(driver, resources) for _ in range(slots)]
        self._pieces: list[_Landed | None] = [None] * slots
        self._next = 0
        resources.callback(self._drop)

    def read(self, address: int, out: NDArray[np.uint8]) -> list[_Landed]:
        """Submit copies of device memory at `address` that will fill `out`, after the work already submitted."""
        slot = self._slots.shape[1]
        return [self._piece(address + at, out[at : at + slot]) for at in range(0, len(out), slot)]

    def _piece(self, address: int, out: NDArray[np.uint8]) -> _Landed:
        at = self._next
        earlier = self._pieces[at]
        if earlier is not None:
            earlier.take()
        slot, event = self._slots[at, : len(out)], self._events[at]
        copy = (int(slot.ctypes.data), address, len(out), self._stream)
        self._driver.call("cuMemcpyDtoHAsync", *copy, doing=f"copying {len(out)} bytes to the host")
        self._driver.call("cuEventRecord", event, self._stream, doing="marking a copy to the host")
        piece = self._pieces[at] = _Landed(self._driver, event, slot, out)
        self._next = (at + 1) % len(self._events)
        return piece

    def _drop(self) -> None:
        for piece in self._pieces:
            if piece is not None:
                piece.drop()


class DeviceRead:
    """Bytes on their way to the host: the `Pending` of `DeviceMemory`."""

    def __init__(self, out: NDArray[np.uint8], pieces: list[_Landed]) -> None:
        self._out = out
        self._pieces = pieces

    def result(self) -> NDArray[np.uint8]:
        for piece in self._pieces:
            piece.take()
        return self._out


class DeviceMemory:
    """The pools of one worker on a device. One thread at a time may use it.

    Everything is allocated here: device memory by `sizes` (bytes a pool), a ring of pinned banks each way, and the stream. If
    any of it fails, all of it is given back. `allocated` is the device bytes taken. `given` are addresses of pools that
    belong to someone else: they are used, and not given back.
    """

    def __init__(
        self,
        driver: Driver,
        sizes: Mapping[Pool, int],
        *,
        given: Mapping[Pool, int] | None = None,
        bank: int = BANK,
        banks: int = BANKS,
    ) -> None:
        self.driver = driver
        self._sizes = dict(sizes)
        self._bases = dict(given or {})
        self.allocated = sum(size for pool, size in sizes.items() if pool not in self._bases)
        with ExitStack() as resources:
            self.stream = driver.call("cuStreamCreate", NON_BLOCKING, doing="creating the stream")
            resources.callback(driver.release, "cuStreamDestroy", self.stream)
            for pool, size in sizes.items():
                if size and pool not in self._bases:
                    self._bases[pool] = _allocate(driver, pool, size, resources)
            self._staging = Staging(driver, self.stream, resources, bank, banks)
            self._landing = Landing(driver, self.stream, resources, bank, banks)
            resources.callback(driver.release, "cuStreamSynchronize", self.stream)  # before the rest is given back
            self._resources = resources.pop_all()

    def base(self, pool: Pool) -> int:
        return self._bases.get(pool, 0)

    def size(self, pool: Pool) -> int:
        return self._sizes.get(pool, 0)

    def write(self, pool: Pool, offset: int, data: NDArray[np.generic]) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        check_range(self, pool, offset, len(raw))
        self._staging.write(self.base(pool) + offset, raw)

    def read(self, pool: Pool, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self.read_later(pool, offset, nbytes).result()

    def read_later(self, pool: Pool, offset: int, nbytes: int) -> DeviceRead:
        check_range(self, pool, offset, nbytes)
        out = np.empty(nbytes, np.uint8)
        return DeviceRead(out, self._landing.read(self.base(pool) + offset, out))

    def fill(self, pool: Pool, byte: int) -> None:
        if self.size(pool):
            fill = (self.base(pool), byte, self.size(pool), self.stream)
            self.driver.call("cuMemsetD8Async", *fill, doing=f"filling {pool.name.lower()}")

    def fill_lines(self, pool: Pool, offset: int, pitch: int, width: int, lines: int, byte: int) -> None:
        check_range(self, pool, offset, (lines - 1) * pitch + width)
        fill = (self.base(pool) + offset, pitch, byte, width, lines, self.stream)
        self.driver.call("cuMemsetD2D8Async", *fill, doing=f"filling lines of {pool.name.lower()}")

    def repeat(self, pool: Pool, nbytes: int) -> None:
        check_range(self, pool, 0, nbytes)
        base = self.base(pool)
        for done, size in doublings(nbytes, self.size(pool)):
            copy = (base + done, base, size, self.stream)
            self.driver.call("cuMemcpyDtoDAsync", *copy, doing=f"copying {size} bytes of {pool.name.lower()}")

    def synchronize(self) -> None:
        self.driver.call("cuStreamSynchronize", self.stream, doing="waiting for the device")

    def seal(self) -> None:
        """From now on any allocation on the device is refused: the worker is ready."""
        self.driver.seal()

    def close(self) -> None:
        """Wait for the work already submitted, whether it failed or not, and give everything back."""
        self._resources.close()
        self._bases, self._sizes = {}, {}


def pinned(driver: Driver, size: int, resources: ExitStack) -> NDArray[np.uint8]:
    """`size` bytes of page-locked host memory, given back when `resources` closes."""
    address = driver.call("cuMemHostAlloc", size, _PORTABLE, doing=f"pinning {size} bytes of host memory")
    resources.callback(driver.release, "cuMemFreeHost", address)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))


def make_event(driver: Driver, resources: ExitStack) -> object:
    """An event without timing, given back when `resources` closes."""
    made: object = driver.call("cuEventCreate", _DISABLE_TIMING, doing="creating an event")
    resources.callback(driver.release, "cuEventDestroy", made)
    return made


def _allocate(driver: Driver, pool: Pool, size: int, resources: ExitStack) -> int:
    doing = f"allocating {size} bytes for the pool {pool.name.lower()}"
    driver.check_unsealed(doing)
    base = int(driver.call("cuMemAlloc", size, doing=doing))
    resources.callback(driver.release, "cuMemFree", base)
    if base % ALIGNMENT:
        raise DeviceError(f"{doing}: address {base:#x} is not a multiple of {ALIGNMENT}", where=f"device {driver.ordinal}")
    return base
