"""Kernels other than attention and the linears compile, within the limits, for GPUs that are not there."""

from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Specialization
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.compile import compile_images, jobs
from ouro_build.builder.toolchain import find_toolchain
from tests.kernel_cases import OVER_ROWS, row_states

# Triton 3.6's sine and cosine keep an array for angles above 105615, which no position reaches.
STACK = {"rope_kv_write": 32}


def specializations() -> tuple[Specialization, ...]:
    """One of every kernel, in bfloat16 where it has a choice."""
    scene = row_states.scene(Random(0), 3)
    launches = [import_module(f"tests.kernel_cases.{name}").case("bfloat16").launch for name in OVER_ROWS]
    launches += [row_states.bind_launch(scene), row_states.resolve_launch(scene, 4), row_states.advance_launch(scene)]
    return tuple(launch.specialization for launch in launches)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    part = find_part(arch)
    wanted = jobs(specializations(), arch, find_toolchain([part]))
    images = compile_images(wanted, ImageCache(tmp_path), workers=2).images
    for job in wanted:
        image, kernel = images[job.key], job.specialization.kernel
        assert image.shared <= part.shared
        assert image.spills <= STACK.get(kernel, 0), f"{kernel}: {image.spills} bytes of stack"
