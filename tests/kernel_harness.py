"""Runs a launch's Triton source and its torch reference on the same tensors and compares every buffer.

Used by `tests/interpret` (Triton's CPU interpreter) and by `tests/gpu` (compiled, on a device).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ouro_build.artifacts.blocks import BLOCK_COLUMNS, BLOCK_ROWS, blocked_shape
from ouro_build.artifacts.plan import Argument, Buffer, Launch, LoadTimeValue, Pool
from ouro_build.artifacts.rows import RECORD, Row
from ouro_build.kernels import registry

Values = Mapping[LoadTimeValue, int]
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int32", "int64", "uint8")}


def buffer(name: str, dtype: str, *shape: int | LoadTimeValue) -> Buffer:
    """A buffer for a launch rule; the pool does not matter here."""
    return Buffer(name, Pool.WORKSPACE, dtype, shape)


def matrix_buffer(name: str, dtype: str, rows: int, columns: int) -> Buffer:
    """A buffer of a weight matrix, in blocks."""
    return buffer(name, dtype, *blocked_shape(rows, columns))


def in_blocks(matrix: Tensor) -> Tensor:
    """A weight matrix [rows, columns] in blocks."""
    bands, across, tall, wide = blocked_shape(*matrix.shape)
    padded = matrix.new_zeros(bands * tall, across * wide)
    padded[: len(matrix), : matrix.shape[1]] = matrix
    return padded.view(bands, BLOCK_ROWS, across, BLOCK_COLUMNS).transpose(1, 2).contiguous()


def poisoned(like: Buffer, values: Values | None = None, device: str = "cpu") -> Tensor:
    """A tensor for `like` with every byte 0xFF: NaN in float types, -1 in integer ones."""
    shape = [d if isinstance(d, int) else (values or {})[d] for d in like.shape]
    kind = DTYPES[like.dtype]
    count = torch.Size(shape).numel() * kind.itemsize
    return torch.full((count,), 0xFF, dtype=torch.uint8, device=device).view(kind).view(shape)


def row_records(slots: list[int], device: str = "cpu", **columns: list[int]) -> Tensor:
    """Resolved row records: `slots` (-1 inactive) and any other columns by lower-case name; the rest is -1."""
    table = torch.full((len(slots), RECORD), -1, dtype=torch.int32)
    table[:, Row.SLOT] = torch.tensor(slots, dtype=torch.int32)
    for name, values in columns.items():
        table[:, Row[name.upper()]] = torch.tensor(values, dtype=torch.int32)
    return table.to(device)


def _arguments(launch: Launch, tensors: Mapping[str, Tensor], values: Values) -> dict[str, Any]:
    def real(name: str, argument: Argument) -> Any:
        if isinstance(argument, Buffer):
            return tensors[name]
        return values[argument] if isinstance(argument, LoadTimeValue) else argument

    return {name: real(name, argument) for name, argument in launch.named().items()}


def run_source(launch: Launch, tensors: Mapping[str, Tensor], values: Values | None = None) -> None:
    """Run the Triton source in place: interpreted or compiled, as TRITON_INTERPRET and the tensors' device say."""
    spec = launch.specialization
    grid = tuple(d if isinstance(d, int) else (values or {})[d] for d in launch.grid)
    options: dict[str, Any] = {
        "num_warps": spec.options.num_warps,
        "num_stages": spec.options.num_stages,
        "enable_fp_fusion": spec.options.fusion,
    }
    if spec.options.maxnreg:
        options["maxnreg"] = spec.options.maxnreg
    constants = dict(spec.constants) | {"PROGRAMMATIC": False}  # launched one by one, and the interpreter has no such thing
    registry.source(spec.kernel)[grid](**_arguments(launch, tensors, values or {}), **constants, **options)


def run_reference(launch: Launch, tensors: Mapping[str, Tensor], values: Values | None = None) -> None:
    """Run the torch reference in place."""
    function, parameters = registry.reference(launch.specialization.kernel)
    every = {**_arguments(launch, tensors, values or {}), **dict(launch.specialization.constants)}
    function(**{name: every[name] for name in parameters})


def check(launch: Launch, tensors: Mapping[str, Tensor], values: Values | None = None) -> dict[str, Tensor]:
    """`compare`, in a case in which the reference writes to every buffer that the kernel may write."""
    want = {name: t.clone() for name, t in tensors.items()}
    run_reference(launch, want, values)
    kernel = registry.kernel(launch.specialization.kernel)
    for name in kernel.writes:
        same = _bits(want[name]).equal(_bits(tensors[name]))
        assert not same, f"the reference of {kernel.name} wrote nothing to {name}: the case tests nothing"
    return compare(launch, tensors, values)


def compare(launch: Launch, tensors: Mapping[str, Tensor], values: Values | None = None) -> dict[str, Tensor]:
    """Run both on copies and compare: written buffers within the kernel's tolerance (poison where neither wrote), the others
    bit for bit. Returns the source's buffers."""
    kernel = registry.kernel(launch.specialization.kernel)
    got = {name: t.clone() for name, t in tensors.items()}
    want = {name: t.clone() for name, t in tensors.items()}
    run_source(launch, got, values)
    run_reference(launch, want, values)
    for name, before in tensors.items():
        if name not in kernel.writes:
            assert _bits(got[name]).equal(_bits(before)), f"{kernel.name} wrote {name}"
            continue
        if want[name].is_floating_point():
            dtype = str(want[name].dtype).removeprefix("torch.")
            torch.testing.assert_close(
                got[name].float(),
                want[name].float(),
                atol=kernel.tolerance.absolute[dtype],
                rtol=kernel.tolerance.relative[dtype],
                equal_nan=True,
                msg=partial("{}: {}: {}".format, kernel.name, name),
            )
        else:
            assert got[name].equal(want[name]), f"{kernel.name}: {name} differs"
    return got


def _bits(t: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])
