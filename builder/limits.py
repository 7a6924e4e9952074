"""What a GPU can launch: a kernel over one of its limits is refused when it is built, not when it is loaded."""

from __future__ import annotations

from ouro_build.artifacts.errors import CompileError
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Specialization
from ouro_build.builder.cache import Image

# The same on every architecture from 8.0 on (CUDA C++ programming guide, "Technical specifications per compute capability").
MAX_THREADS = 1024
REGISTER_FILE = 65536
_REGISTER_UNIT = 8
_WARP = 32


def check_limits(part: Part, specialization: Specialization, image: Image) -> None:
    """Raise CompileError if one block of `image` needs more than a multiprocessor of `part` has."""
    threads = _WARP * specialization.options.num_warps
    registers = -(-image.registers // _REGISTER_UNIT) * _REGISTER_UNIT * threads
    for what, needed, limit in (
        ("bytes of shared memory", max(image.shared, specialization.options.shared), part.shared),
        ("registers", registers, REGISTER_FILE),
        ("threads", threads, MAX_THREADS),
    ):
        if needed > limit:
            constants = ", ".join(f"{name}={value}" for name, value in specialization.constants)
            raise CompileError(
                f"a block needs {needed} {what}; {part.arch} has {limit}",
                where=f"kernel {specialization.kernel} ({constants}) for --gpu {part.name}",
                hint="Its launch rule chose a configuration that does not fit: please report it.",
            )
