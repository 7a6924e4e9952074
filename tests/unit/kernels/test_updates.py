"""What kernels declare to update is what they both read and write: seen in every launch of every program, by the references."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ouro_build.artifacts.plan import Launch, ProgramKey
from ouro_build.kernels import registry
from ouro_build.runtime.load_time import Values
from tests.kernel_harness import run_reference
from tests.programs import Programs

OTHERS = (0x00, 0xFF)
"""Bytes that a buffer is filled with, in place of what it held."""
READ = ProgramKey("read", 1)


def test_kernels_update_what_they_say() -> None:
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(40,))
    launched, updated = set[str](), dict[str, set[str]]()
    for key in (*programs.keys, READ):
        # Rows that keep their slots begin a token after loops of the one before.
        scene = ProgramKey("kv_copy", key.bucket) if key.program == "prelude" else key
        programs.enter(scene, [i % 3 != 1 for i in range(key.bucket)])
        for launch, tensors in programs.launches(key):
            name = launch.specialization.kernel
            launched.add(name)
            updated.setdefault(name, set()).update(updates(launch, tensors, programs.values))
    assert launched == set(registry.NAMES)
    assert updated == {name: set(registry.kernel(name).updates) for name in launched}


def updates(launch: Launch, tensors: dict[str, Tensor], values: Values) -> Iterator[str]:
    """Arguments that the launch writes and whose contents before decide what it writes. Leaves `tensors` as it does."""
    written = {name: bits(tensors[name]) for name in registry.kernel(launch.specialization.kernel).writes if name in tensors}
    before = {name: raw.clone() for name, raw in written.items()}
    run_reference(launch, tensors, values)
    after = {name: raw.clone() for name, raw in written.items()}
    for name in written:
        for other in OTHERS:
            restore(written, before)
            written[name].fill_(other)
            run_reference(launch, tensors, values)
            same = {n: raw == after[n] for n, raw in written.items()}
            left_alone = (written[name] == other) & (after[name] == before[name])
            same[name] |= left_alone
            if not all(which.all() for which in same.values()):
                yield name
                break
    restore(written, after)


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, in place."""
    return tensor.view(-1).view(torch.uint8)


def restore(written: dict[str, Tensor], contents: dict[str, Tensor]) -> None:
    for name, raw in written.items():
        raw.copy_(contents[name])
