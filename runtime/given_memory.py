"""Device memory that the process owns already, handed in as a worker's pools.

Whoever hands memory in keeps owning it. A worker uses it alone from the moment it is loaded until it is closed, whatever was
in it is lost, and what is left in it means nothing; it never frees it. Tensors given by DLPack are held until then, and their
library is told when they are let go. Pools that are not given are allocated as ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.manifest import MemoryPlan
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import open_artifact
from ouro_build.runtime.dlpack import CUDA, Span, Taken, take
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.memory import ALIGNMENT

_HINT = "`needed_bytes` of `ouro_build.runtime.given_memory` says how much every pool takes."


def needed_bytes(path: str | os.PathLike[str], part: str | None = None, kv_blocks: int | None = None) -> dict[Pool, int]:
    """Bytes of every pool of the artifact at `path`, those of no bytes left out.

    `part` names the GPU, where there are several; `kv_blocks` is the number of KV blocks, by default as planned.
    Raises UsageError for a part that it was not built for and for fewer than one block, and what `open_artifact` raises.
    """
    if kv_blocks is not None and kv_blocks < 1:
        raise UsageError(f"{kv_blocks}, at least 1 expected", where="kv_blocks")
    manifest = open_artifact(Path(path), "sizes").manifest
    target = manifest.targets[0] if part is None else manifest.target(part)
    if target is None or (part is None and len(manifest.targets) > 1):
        known = ", ".join(t.part.name for t in manifest.targets)
        raise UsageError(f"the artifact was built for {known}", where=f"part {part}", hint="Name one of them, as part=.")
    sizes = {pool: target.memory.pool_bytes(pool, kv_blocks) for pool in Pool}
    return {pool: size for pool, size in sizes.items() if size}


class GivenMemory:
    """Pools by `Pool` or by name: (address, bytes), a DLPack capsule, or an object with `__dlpack__` such as a torch tensor.

    Raises UsageError for what is no memory, and takes nothing then.
    """

    def __init__(self, given: Mapping[Pool | str, object]) -> None:
        self._taken: list[Taken] = []
        self._spans: dict[Pool, Span] = {}
        try:
            for name, value in given.items():
                pool = _pool(name)
                if pool in self._spans:
                    raise UsageError("it is given twice", where=_where(pool))
                self._spans[pool] = self._span(value, _where(pool))
        except BaseException:
            self.release()
            raise

    @property
    def bytes(self) -> int:
        """Bytes given in all."""
        return sum(span.bytes for span in self._spans.values())

    def __bool__(self) -> bool:
        """Whether any pool is given."""
        return bool(self._spans)

    def kv_blocks(self, plan: MemoryPlan, most: int, least: int) -> int:
        """Blocks that a given KV pool holds, at most `most`, or `most` if none is given. Raises UsageError for too few."""
        span = self._spans.get(Pool.KV)
        if span is None:
            return most
        blocks = min(most, span.bytes // plan.kv_block_bytes)
        if blocks < least:
            what = f"{span.bytes} bytes are given, {least * plan.kv_block_bytes} are needed for one request"
            raise UsageError(what, where=_where(Pool.KV), hint=_HINT)
        return blocks

    def addresses(self, driver: Driver, sizes: Mapping[Pool, int]) -> dict[Pool, int]:
        """Where every given pool lies, after the work that the process has submitted so far on this device.

        Raises UsageError unless each is memory of `driver`'s device, aligned, as large as `sizes` says, and apart from the
        others.
        """
        spans = {pool: span for pool, span in self._spans.items() if sizes.get(pool)}
        for pool, span in spans.items():
            _check(driver, _where(pool), span, sizes[pool])
        ordered = sorted(spans.items(), key=lambda item: item[1].address)
        for (first, span), (second, after) in pairwise(ordered):
            if span.address + sizes[first] > after.address:
                raise UsageError(f"it overlaps the pool {first.name.lower()}", where=_where(second))
        if spans:
            driver.call("cuCtxSynchronize", doing="waiting for work on the memory that was given")
        return {pool: span.address for pool, span in spans.items()}

    def release(self) -> None:
        """Let all of it go."""
        for taken in self._taken:
            taken.release()
        self._taken.clear()

    def _span(self, value: object, where: str) -> Span:
        if isinstance(value, tuple):
            if len(value) != 2 or not all(isinstance(number, int) and number > 0 for number in value):
                raise UsageError(f"{value!r} is not (address, bytes)", where=where)
            return Span(*value, (CUDA, -1))
        taken = take(value, where)
        self._taken.append(taken)
        return taken.span


def _pool(name: Pool | str) -> Pool:
    known = {pool.name.lower(): pool for pool in Pool}
    if isinstance(name, Pool):
        return name
    if name not in known:
        raise UsageError(f"there is no pool {name!r}", where="pools", hint=f"Known: {', '.join(known)}")
    return known[name]


def _where(pool: Pool) -> str:
    return f"pools: {pool.name.lower()}"


def _check(driver: Driver, where: str, span: Span, size: int) -> None:
    kind, number = span.device
    if kind != CUDA or number not in (-1, driver.ordinal):
        raise UsageError(f"it is on DLPack device {kind}:{number}, {CUDA}:{driver.ordinal} is needed", where=where)
    if span.bytes < size:
        raise UsageError(f"{span.bytes} bytes are given, {size} are needed", where=where, hint=_HINT)
    if span.address % ALIGNMENT:
        raise UsageError(f"address {span.address:#x} is not a multiple of {ALIGNMENT}", where=where)
    for address in (span.address, span.address + size - 1):
        _check_address(driver, where, address)


def _check_address(driver: Driver, where: str, address: int) -> None:
    """The driver knows the address as memory of its device."""
    attributes, doing = driver.api.CUpointer_attribute, f"asking about address {address:#x}"
    answers = []
    for attribute in (attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL):
        status, value = driver.invoke("cuPointerGetAttribute", attribute, address, doing=doing)
        if status:
            raise UsageError(f"address {address:#x} is no memory that CUDA knows", where=where)
        answers.append(int(value))
    device = int(driver.api.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    if answers != [device, driver.ordinal]:
        what = f"address {address:#x} is memory of type {answers[0]} on device {answers[1]}"
        raise UsageError(f"{what}, type {device} on device {driver.ordinal} is needed", where=where)
