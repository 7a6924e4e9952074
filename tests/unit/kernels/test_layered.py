"""Of what kernels declare as layered they touch one layer: seen in every launch of every program, by the references."""

from __future__ import annotations

import torch
from torch import Tensor

from ouro_build.artifacts.plan import Buffer, Launch, Pool
from ouro_build.kernels import registry
from ouro_build.runtime.load_time import Values
from tests.kernel_harness import run_reference
from tests.programs import Programs
from tests.unit.kernels.test_updates import OTHERS, bits, restore

SHARED = "retained_counts"
"""What all layers share in the pool of references."""


def test_kernels_keep_to_the_layer_that_they_are_given() -> None:
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(40,))
    seen: dict[str, set[str]] = {name: set() for name in registry.NAMES}
    for key in programs.keys:
        programs.enter(key, [i % 3 != 1 for i in range(key.bucket)])
        for launch, tensors in programs.launches(key):
            layered = [name for name in registry.kernel(launch.specialization.kernel).layered if name in tensors]
            seen[launch.specialization.kernel].update(layered)
            elsewhere = {name: other_layers(name, tensors[name], launch, programs.model.layers) for name in layered}
            check_layer(launch, tensors, elsewhere, programs.values)
    assert seen == {name: set(registry.kernel(name).layered) for name in registry.NAMES}


def test_what_has_layers_is_declared_by_every_kernel_that_is_given_one() -> None:
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(40,))
    for key in programs.keys:
        for launch, _ in programs.launches(key):
            kernel = registry.kernel(launch.specialization.kernel)
            declared = {name for name, _ in launch.buffers() if name in kernel.layered}
            expected = {name for name, buffer in launch.buffers() if has_layers(name, buffer)}
            assert declared == (expected if "layer" in launch.named() else set()), kernel.name


def test_layers_are_those_of_the_model() -> None:
    """Planes are counted through all loops: a layer past the last would be another loop's."""
    programs = Programs("bfloat16", buckets=(3,), prefill_buckets=(40,))
    for key in programs.keys:
        for launch, _ in programs.launches(key):
            if "layer" in launch.named():
                assert launch.named()["layer"] in range(programs.model.layers)
                assert dict(launch.specialization.constants)["LAYERS"] == programs.model.layers


def has_layers(name: str, buffer: Buffer) -> bool:
    """Whether it is kept by layer, and outlives the launches of one."""
    return buffer.pool in (Pool.KV, Pool.REFERENCES) and name != SHARED


def other_layers(name: str, tensor: Tensor, launch: Launch, layers: int) -> Tensor:
    """Which bytes belong to the other layers: of kv [loops * layers, …] or of a reference buffer [slots, layers, …]."""
    mask = torch.ones((*tensor.shape, tensor.element_size()), dtype=torch.bool)
    layer = launch.named()["layer"]
    assert isinstance(layer, int)
    shape = (-1, layers, *mask.shape[1:]) if name == "kv" else mask.shape
    mask.view(shape)[:, layer] = False
    return mask.view(-1)


def check_layer(launch: Launch, tensors: dict[str, Tensor], elsewhere: dict[str, Tensor], values: Values) -> None:
    """The launch does the same whatever is at other layers, and leaves it there. Leaves `tensors` as it does."""
    kernel, raw = launch.specialization.kernel, {name: bits(t) for name, t in tensors.items()}
    before = {name: t.clone() for name, t in raw.items()}
    run_reference(launch, tensors, values)
    after = {name: t.clone() for name, t in raw.items()}
    for other in OTHERS if elsewhere else ():
        restore(raw, before)
        for name, mask in elsewhere.items():
            raw[name][mask] = other
        run_reference(launch, tensors, values)
        for name, mask in elsewhere.items():
            assert (raw[name][mask] == other).all(), f"{kernel} wrote another layer of {name}"
            raw[name][mask] = after[name][mask]
        for name in raw:
            assert raw[name].equal(after[name]), f"{kernel} reads another layer: it wrote something else to {name}"
    restore(raw, after)
