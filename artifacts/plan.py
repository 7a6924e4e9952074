"""Launch plans: what a program launches, as plain values.

A `Launch` names a kernel specialisation, a grid and typed arguments. An argument is a buffer (an address in a pool), a
constant, or a load-time value. Nothing here knows a device: executors turn a plan into work.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TypeVar

import msgspec

from ouro_build.artifacts.dtypes import DTYPES, nbytes

KERNEL_NODE = 0
"""The only node tag of format 1.0."""


class Pool(IntEnum):
    """Planned device memory. The number is the pool's code in stored plans."""

    WEIGHTS = 0
    KV = 1
    REFERENCES = 2
    STATE = 3
    WORKSPACE = 4
    IO = 5


class LoadTimeValue(Enum):
    """Values that only the worker knows, and that plans may name. Order is their stored code: append only."""

    KV_BLOCKS = "kv_blocks"  # KV blocks of every plane
    KV_PLANE_STRIDE = "kv_plane_stride"  # elements from a KV plane to the next
    SM_COUNT = "sm_count"
    KV_BLOCK_STRIDE = "kv_block_stride"  # elements from a KV block of a plane to the next


LOAD_TIME_VALUES: tuple[LoadTimeValue, ...] = tuple(LoadTimeValue)

Dim = int | LoadTimeValue
"""A size that is known now, or at load."""


class Edge(IntEnum):
    """How a launch depends on an earlier one."""

    FULL = 0  # starts when the other has finished
    PROGRAMMATIC = 1  # may start when the other allows it, and waits inside for the other's writes


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contiguous row-major tensor in a pool. `offset` is in bytes; -1 until the planner has placed it."""

    name: str
    pool: Pool
    dtype: str
    shape: tuple[Dim, ...]
    offset: int = -1

    @property
    def bytes(self) -> int:
        """Bytes it occupies; a buffer with a load-time dimension has none of its own and fills its pool."""
        sizes = tuple(d for d in self.shape if isinstance(d, int))
        return nbytes(self.dtype, sizes) if len(sizes) == len(self.shape) else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape where no dimension is a load-time value."""
        if any(isinstance(d, LoadTimeValue) for d in self.shape):
            raise ValueError(f"{self.name} has load-time dimensions: {self.shape}")
        return tuple(d for d in self.shape if isinstance(d, int))

    @property
    def pointer_type(self) -> str:
        """Its type in a kernel's signature."""
        return "*" + DTYPES[self.dtype].triton


_Default = TypeVar("_Default")


def stored(value: _Default) -> _Default:
    """A default that is stored too: of a struct that omits defaults msgspec omits no default that is made anew."""
    return msgspec.field(default_factory=lambda: value)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a kernel is compiled with, and what a launch of it asks of a multiprocessor. `maxnreg` 0 leaves the registers to the
    compiler.

    Without `fusion` a product and a sum are never joined into one rounding, unless the source says so: images of one source
    then give the same bits, which parts of it they were compiled from notwithstanding.

    `carveout` is the share, in percent, of the most shared memory a multiprocessor can have that launches prefer, -1 the
    driver's choice; `shared` the bytes of shared memory that a block has at least, its own included. Neither changes the image,
    and their defaults are not stored.
    """

    num_warps: int
    num_stages: int
    maxnreg: int = stored(0)
    programmatic: bool = stored(False)
    fusion: bool = stored(True)
    carveout: int = -1
    shared: int = 0


Constant = int | bool | str | None


class Specialization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one image is compiled from, apart from the source: types, constants and options.

    `types` holds (argument, Triton type) of the run-time arguments in the kernel's order; `divisible` the arguments known
    to be multiples of 16; `constants` the compile-time parameters.
    """

    kernel: str
    contract: int
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    divisible: tuple[str, ...]
    options: Options

    def compiled(self) -> Specialization:
        """It without what only launches: equal for specialisations of one image."""
        return msgspec.structs.replace(self, options=msgspec.structs.replace(self.options, carveout=-1, shared=0))


Argument = Buffer | int | float | LoadTimeValue


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel launch. `arguments` are in the order of the specialisation's `types`; `after` holds (index, edge)."""

    specialization: Specialization
    grid: tuple[Dim, Dim, Dim]
    arguments: tuple[Argument, ...]
    after: tuple[tuple[int, Edge], ...] = ()

    def named(self) -> dict[str, Argument]:
        """Arguments by the kernel's parameter names."""
        names = (name for name, _ in self.specialization.types)
        return dict(zip(names, self.arguments, strict=True))

    def buffers(self) -> tuple[tuple[str, Buffer], ...]:
        """(parameter, buffer) of every pointer argument."""
        return tuple((name, a) for name, a in self.named().items() if isinstance(a, Buffer))


class ProgramKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """What a plan is for. `variant` is empty unless a program comes in several forms for one mode."""

    program: str
    bucket: int
    mode: str = "dense"
    variant: str = ""

    def __str__(self) -> str:
        tail = f"/{self.variant}" if self.variant else ""
        return f"{self.program}/{self.bucket}/{self.mode}{tail}"


class Plan(msgspec.Struct, frozen=True):
    """A program's launches for one key, in an order that respects every `after`."""

    key: ProgramKey
    launches: tuple[Launch, ...]
