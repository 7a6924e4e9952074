"""What GPU this machine has, asked of the driver."""

from __future__ import annotations

from typing import Any

from ouro_build.artifacts.errors import NoDeviceError
from ouro_build.artifacts.fit import CONTEXT_BYTES, Machine
from ouro_build.artifacts.records import DeviceRecord
from ouro_build.runtime.driver import Driver, open_driver

_NAME = 256  # bytes asked for; the longest names are a quarter of it


def probe(device: int = 0, api: Any = None) -> Machine:
    """The machine as CUDA device `device` shows it, or an absent one with the reason why.

    Makes and gives back a context; a worker that keeps its own asks `describe`. Raises UsageError for a number that no
    device has, DeviceError if the device cannot be used.
    """
    try:
        driver = open_driver(device, api)
    except NoDeviceError as error:
        return Machine.absent(error.what)
    try:
        return describe(driver)
    finally:
        driver.close()


def describe(driver: Driver) -> Machine:
    """The machine as an open device shows it. `memory_free` is what is left beside the context that is open now.

    No call tells how much that context holds: `context` is what plans count for one, or all that is in use if that is less.
    """
    doing = f"asking about CUDA device {driver.ordinal}"
    attributes = driver.api.CUdevice_attribute

    def attribute(name: str) -> int:
        code = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", code, driver.device, doing=doing))

    name: bytes = driver.call("cuDeviceGetName", _NAME, driver.device, doing=doing)
    free, total = driver.call("cuMemGetInfo", doing=doing)
    version = int(driver.call("cuDriverGetVersion", doing=doing))
    return Machine(
        name=name.split(b"\0")[0].decode(errors="replace"),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        memory_total=int(total),
        memory_free=int(free),
        context=min(int(total) - int(free), CONTEXT_BYTES),
        cuda=(version // 1000, version % 1000 // 10),
    )


def device_record(machine: Machine) -> DeviceRecord:
    """The machine's GPU as records name it."""
    return DeviceRecord(
        name=machine.name,
        capability=machine.capability,
        sm_count=machine.sm_count,
        memory=machine.memory_total,
        cuda=machine.cuda or (0, 0),
    )
