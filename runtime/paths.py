"""Which path a worker takes on this machine, decided before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from ouro_build.artifacts.errors import FitError
from ouro_build.artifacts.fit import Fit, Machine, fit
from ouro_build.artifacts.manifest import Manifest, TargetRecord
from ouro_build.artifacts.records import Reason
from ouro_build.artifacts.references import slots_part
from ouro_build.runtime.executor import ExecutorName

Choice = Literal["auto", "graph", "launch", "reference"]
NO_CUDA = "the torch that is installed cannot use this machine's GPU"


@dataclass(frozen=True)
class WorkerPath:
    """The target whose plans run, whether its pools are on the device, the first executor, and why it is not `graph`."""

    target: TargetRecord
    on_device: bool
    executor: ExecutorName
    reason: Reason | None
    kv_blocks: int
    notes: tuple[str, ...]


def choose_path(manifest: Manifest, machine: Machine, wanted: Choice, memory: int | None) -> WorkerPath:
    """Decide how `manifest` runs on `machine`.

    Raises FitError if `graph` or `launch` was asked for and does not fit, if the memory does not suffice, or if the
    reference is needed and torch is not installed.
    """
    verdict = fit(manifest, machine, memory)
    if wanted == "reference":
        return _reference(manifest, machine, verdict, Reason.GRAPHS_DISABLED, memory)
    if verdict.accepted:
        chosen = verdict.chosen
        target = manifest.target(chosen.target) or manifest.targets[0]
        reason = Reason.GRAPHS_DISABLED if wanted == "launch" else None
        executor: ExecutorName = "launch" if wanted == "launch" else "graph"
        return WorkerPath(target, True, executor, reason, chosen.kv_blocks, chosen.notes)
    reason = _why(verdict)
    if wanted != "auto" or reason is None:
        raise verdict.error()
    return _reference(manifest, machine, verdict, reason, memory)


def _why(verdict: Fit) -> Reason | None:
    """The reason for which the reference takes over; None if it can't, because the memory does not suffice."""
    if verdict.no_device:
        return Reason.NO_DEVICE
    refused = [{r.what for r in t.refusals} for t in verdict.targets]
    if all("capability" in what for what in refused):
        return Reason.NO_IMAGE_FOR_ARCH
    if all(what & {"capability", "cuda"} for what in refused):
        return Reason.DRIVER_TOO_OLD
    return None


def _reference(manifest: Manifest, machine: Machine, verdict: Fit, reason: Reason, memory: int | None) -> WorkerPath:
    if find_spec("torch") is None:
        raise FitError(
            f"only the reference executor could run here ({reason.value}), and it needs torch, which is not installed",
            where="fit",
            hint=f"{verdict.error()}\nOr install torch: pip install 'ouro-build[reference]'",
        )
    target = manifest.targets[0] if verdict.target is None else manifest.target(verdict.target) or manifest.targets[0]
    on_device = not machine.reason and torch_has_cuda()
    return WorkerPath(target, on_device, "reference", reason, _blocks(manifest, target, machine, on_device, memory), ())


def torch_has_cuda() -> bool:
    """Whether the torch that is installed can use this machine's GPU."""
    from ouro_build.runtime.reference import require_torch

    return bool(require_torch().cuda.is_available())


def _blocks(manifest: Manifest, target: TargetRecord, machine: Machine, on_device: bool, memory: int | None) -> int:
    """KV blocks for the reference: what the declared requests can use, within `memory` bytes, or what is free on the device.

    On a device the plan's reserve is left to the context, which is open already, and to torch. On the host pages are taken
    only when they are used.
    """
    plan, geometry = target.memory, manifest.geometry
    most = min(plan.kv_blocks, geometry.max_requests * geometry.table_width)
    if memory is None and not on_device:
        return most
    allowed, given = (machine.available, "free") if memory is None else (memory, "given with --memory")
    fixed = sum(record.bytes for record in plan.pools) + (plan.reserve if on_device else 0)
    blocks = min(most, (allowed - fixed) // plan.kv_block_bytes)
    if blocks < min(most, geometry.table_width):
        needed = fixed + geometry.table_width * plan.kv_block_bytes
        parts = f"the pools{slots_part(manifest.model, geometry)} and one request of {geometry.max_context} tokens"
        raise FitError(
            f"{needed} bytes are needed for {parts}, {allowed} are {given}",
            where="memory",
            hint="Give the worker more with --memory, free the device's memory, or build with a smaller --max-context.",
        )
    return blocks
