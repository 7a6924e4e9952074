"""Where a worker's pools are: the device and the path that were found, and the pools opened there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ouro_build.artifacts.errors import NoDeviceError, UsageError
from ouro_build.artifacts.fit import Machine
from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import Artifact
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.machine import describe
from ouro_build.runtime.opening import OpeningDriver
from ouro_build.runtime.paths import Choice, WorkerPath, choose_path
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.upload import FileUpload

if TYPE_CHECKING:
    from ouro_build.runtime.given_memory import GivenMemory


def given_memory(pools: Mapping[Pool | str, object] | None) -> GivenMemory | None:
    """What `pools` hands in, None for nothing. Raises UsageError for what is no memory."""
    if not pools:
        return None
    from ouro_build.runtime.given_memory import GivenMemory

    return GivenMemory(pools)


def choose(manifest: Manifest, machine: Machine, executor: Choice, memory: int | None, given: GivenMemory | None) -> WorkerPath:
    """The path; what is given counts as free, and a given KV pool decides how many blocks there are."""
    if given is None:
        return choose_path(manifest, machine, executor, memory)
    chosen = choose_path(manifest, replace(machine, memory_free=machine.memory_free + given.bytes), executor, memory)
    if not chosen.on_device:
        raise UsageError("device memory is given, and the worker would run on the host", where="pools", hint="Give none.")
    plan = chosen.target.memory
    least = min(plan.kv_blocks, manifest.geometry.table_width)
    return dataclasses.replace(chosen, kv_blocks=given.kv_blocks(plan, chosen.kv_blocks, least))


def wait_for(opening: OpeningDriver) -> tuple[Driver | None, Machine]:
    """The device that was being opened, current on this thread, and the machine; no device where there is none to use."""
    try:
        driver = opening.result()
    except NoDeviceError as error:
        return None, Machine.absent(error.what)
    return driver, describe(driver)


def open_pools(
    artifact: Artifact,
    path: WorkerPath,
    loading: Loading,
    clock: StartupClock,
    driver: Driver | None,
    upload: FileUpload | None = None,
) -> Pools:
    """The pools of `path` with its executors, on the device or on the host. Takes `driver` and `upload` over."""
    if driver is not None and path.on_device:
        from ouro_build.runtime.device_pools import open_device_pools

        return open_device_pools(artifact, path, loading, clock, driver, upload)
    from ouro_build.runtime.host_pools import open_host_pools

    if upload is not None:
        upload.close()  # the reference maps the file for itself, and pages that it never uses are never read
    if driver is not None:
        driver.close()  # its context would hold device memory that nothing here uses
    return open_host_pools(artifact, path, loading, clock)
