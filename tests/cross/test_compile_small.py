"""Kernels other than attention and the linears compile, within the limits, for GPUs that are not there."""

from importlib import import_module
from pathlib import Path
from random import Random

import msgspec
import pytest

from ouro_build.artifacts.parts import Part, find_part
from ouro_build.artifacts.plan import Specialization
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.compile import compile_images, jobs
from ouro_build.builder.toolchain import find_toolchain
from ouro_build.kernels.spec import programmatic
from tests.kernel_cases import OVER_ROWS, STACK, read_pool, row_states


def specializations(part: Part) -> tuple[Specialization, ...]:
    """One of every kernel for `part`, in bfloat16 where it has a choice."""
    scene = row_states.scene(Random(0), 3)
    launches = [import_module(f"tests.kernel_cases.{name}").case("bfloat16").launch for name in OVER_ROWS]
    launches += [row_states.bind_launch(scene), row_states.resolve_launch(scene, 4), row_states.advance_launch(scene)]
    launches.append(read_pool.case(read_pool.WORDS[2]).launch)
    return tuple(for_part(launch.specialization, part) for launch in launches)


def for_part(spec: Specialization, part: Part) -> Specialization:
    """What the launch rule, which the cases call for one part, says for another: these differ in the start alone."""
    constants = dict(spec.constants) | {"PROGRAMMATIC": programmatic(part)}
    options = msgspec.structs.replace(spec.options, programmatic=programmatic(part))
    return msgspec.structs.replace(spec, constants=tuple(constants.items()), options=options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    part = find_part(arch)
    wanted = jobs(specializations(part), arch, find_toolchain([part]))
    images = compile_images(wanted, ImageCache(tmp_path), workers=2).images
    for job in wanted:
        image, kernel = images[job.key], job.specialization.kernel
        assert image.shared <= part.shared
        assert image.spills <= STACK.get(kernel, 0), f"{kernel}: {image.spills} bytes of stack"
