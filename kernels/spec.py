"""What a kernel declares about itself, and how its launch rule becomes a `Launch` value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Argument, Buffer, Constant, Dim, Launch, LoadTimeValue, Options, Specialization

# Divisors that every worker's values have: the planner sizes a KV block in multiples of 16 elements.
LOAD_TIME_DIVISORS: dict[LoadTimeValue, int] = {
    LoadTimeValue.KV_BLOCKS: 1,
    LoadTimeValue.KV_PLANE_STRIDE: 16,
    LoadTimeValue.SM_COUNT: 1,
    LoadTimeValue.KV_BLOCK_STRIDE: 16,
}
_ALIGNED = 16
_PROGRAMMATIC_FROM = 90  # griddepcontrol came with compute capability 9.0


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel's output may be from its reference's, by output type, and why."""

    absolute: Mapping[str, float]
    relative: Mapping[str, float]
    reason: str


@dataclass(frozen=True)
class Kernel:
    """A kernel's name, the version of its meaning, the arguments it writes, its tolerance. The other arguments it only reads.

    What it may read before it waits for its predecessors: `weights`, which nothing writes, and `early`, which was written by
    launches that have ended when this one starts: past the L1 cache, which may hold what was there before, or after a load
    that acquires.
    `settled` are those of `early` that launches may be writing then, of which it reads before its wait only what they leave
    alone. `updates` are those of `writes` that it also reads: what they held before decides what it writes, be it there or
    elsewhere.
    `layered` are buffers of which a launch touches only what belongs to the layer that its argument `layer` names, so that
    launches at two layers do not meet there.

    For an inactive row a kernel writes nothing to what outlives the program (`Pool.KV`, `STATE`, `REFERENCES`, `IO`). That row
    of a workspace buffer it may fill with anything, as `linear_few` and `linear_silu` do: what stores whatever it computed need
    not wait for the row records first. So no kernel may rely on what is there, but where the rule of the kernel that wrote it
    says what an inactive row gets (`resolve`, `route_rows`, `split_contexts`).
    """

    name: str
    contract: int
    writes: tuple[str, ...]
    tolerance: Tolerance
    weights: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    layered: tuple[str, ...] = ()

    def launch(
        self,
        part: Part,
        grid: tuple[Dim, Dim, Dim],
        arguments: Mapping[str, Argument],
        constants: Mapping[str, Constant],
        options: Options,
    ) -> Launch:
        """A launch of this kernel on `part`. `arguments` must be in the order of the kernel's parameters.

        Every kernel takes a constant PROGRAMMATIC, which is set here: whether it starts beside its predecessors and waits
        inside for what they wrote.

        Integers are passed as int32, load-time values as int64, floats as float32. Buffers are placed at multiples of
        256 bytes, so every pointer is known to be aligned.
        """
        early_start = programmatic(part)
        specialization = Specialization(
            kernel=self.name,
            contract=self.contract,
            types=tuple((name, _type(a)) for name, a in arguments.items()),
            constants=(*constants.items(), ("PROGRAMMATIC", early_start)),
            divisible=tuple(name for name, a in arguments.items() if _divisible(a)),
            options=msgspec.structs.replace(options, programmatic=early_start),
        )
        return Launch(specialization=specialization, grid=grid, arguments=tuple(arguments.values()))


def programmatic(part: Part) -> bool:
    """Whether kernels on `part` take part in programmatic dependencies."""
    return part.capability >= _PROGRAMMATIC_FROM


def _type(argument: Argument) -> str:
    if isinstance(argument, Buffer):
        return argument.pointer_type
    if isinstance(argument, LoadTimeValue):
        return "i64"
    return "fp32" if isinstance(argument, float) else "i32"


def _divisible(argument: Argument) -> bool:
    if isinstance(argument, Buffer):
        return True
    if isinstance(argument, LoadTimeValue):
        return LOAD_TIME_DIVISORS[argument] % _ALIGNED == 0
    return False


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)
