"""The pools on a device: allocated once, written and read through pinned staging, all on one stream."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.plan import Pool
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.memory import ALIGNMENT, check_range

BANK = 4 << 20
"""Bytes of one staging bank."""
BANKS = 4
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit ordering with the legacy default stream
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
        self._events = [_event(driver, resources) for _ in range(banks)]
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


class DeviceMemory:
    """The pools of one worker on a device. One thread at a time may use it.

    Everything is allocated here: device memory by `sizes` (bytes a pool), staging, the read buffer and the stream. If any
    of it fails, all of it is given back. `allocated` is the device bytes taken.
    """

    def __init__(self, driver: Driver, sizes: dict[Pool, int], *, bank: int = BANK, banks: int = BANKS) -> None:
        self.driver = driver
        self._sizes = dict(sizes)
        self._bases: dict[Pool, int] = {}
        with ExitStack() as resources:
            self.stream = driver.call("cuStreamCreate", _NON_BLOCKING, doing="creating the stream")
            resources.callback(driver.release, "cuStreamDestroy", self.stream)
            for pool, size in sizes.items():
                if size:
                    self._bases[pool] = _allocate(driver, pool, size, resources)
            self._staging = Staging(driver, self.stream, resources, bank, banks)
            self._landing = pinned(driver, bank, resources)
            resources.callback(driver.release, "cuStreamSynchronize", self.stream)  # before the rest is given back
            self._resources = resources.pop_all()

    @property
    def allocated(self) -> int:
        """Bytes of device memory that the pools take."""
        return sum(self._sizes[pool] for pool in self._bases)

    def base(self, pool: Pool) -> int:
        return self._bases.get(pool, 0)

    def size(self, pool: Pool) -> int:
        return self._sizes.get(pool, 0)

    def write(self, pool: Pool, offset: int, data: NDArray[np.generic]) -> None:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        check_range(self, pool, offset, len(raw))
        self._staging.write(self.base(pool) + offset, raw)

    def read(self, pool: Pool, offset: int, nbytes: int) -> NDArray[np.uint8]:
        check_range(self, pool, offset, nbytes)
        out = np.empty(nbytes, np.uint8)
        source, landing = self.base(pool) + offset, int(self._landing.ctypes.data)
        for at in range(0, nbytes, len(self._landing)):
            size = min(len(self._landing), nbytes - at)
            copy = (landing, source + at, size, self.stream)
            self.driver.call("cuMemcpyDtoHAsync", *copy, doing=f"copying {size} bytes of {pool.name.lower()} to the host")
            self.synchronize()
            out[at : at + size] = self._landing[:size]
        return out

    def fill(self, pool: Pool, byte: int) -> None:
        if self.size(pool):
            fill = (self.base(pool), byte, self.size(pool), self.stream)
            self.driver.call("cuMemsetD8Async", *fill, doing=f"filling {pool.name.lower()}")

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


def _event(driver: Driver, resources: ExitStack) -> object:
    event: object = driver.call("cuEventCreate", _DISABLE_TIMING, doing="creating an event")
    resources.callback(driver.release, "cuEventDestroy", event)
    return event


def _allocate(driver: Driver, pool: Pool, size: int, resources: ExitStack) -> int:
    doing = f"allocating {size} bytes for the pool {pool.name.lower()}"
    driver.check_unsealed(doing)
    base = int(driver.call("cuMemAlloc", size, doing=doing))
    resources.callback(driver.release, "cuMemFree", base)
    if base % ALIGNMENT:
        raise DeviceError(f"{doing}: address {base:#x} is not a multiple of {ALIGNMENT}", where=f"device {driver.ordinal}")
    return base
