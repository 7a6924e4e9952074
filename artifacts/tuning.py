"""Tuning tables: the configurations that launch rules choose, as data, with what they were measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.parts import ARCHITECTURES
from ouro_build.artifacts.plan import stored
from ouro_build.artifacts.records import DeviceRecord
from ouro_build.artifacts.strict_json import parse_object

_MOST_BYTES = 16 << 20
_Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Registers = Annotated[int, msgspec.Meta(ge=0, le=255)]
_Warps = Annotated[int, msgspec.Meta(ge=1, le=16)]
_Side = Annotated[int, msgspec.Meta(ge=16, le=512)]
_Carveout = Annotated[int, msgspec.Meta(ge=-1, le=100)]
_Shared = Annotated[int, msgspec.Meta(ge=0, le=227 << 10)]
_Stages = Annotated[int, msgspec.Meta(ge=1, le=8)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}$"
_Time = Annotated[float, msgspec.Meta(gt=0)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything in a table."""


class Fragments(_Record, frozen=True, kw_only=True, tag_field="form", tag="fragments", omit_defaults=True):
    """How programs of the kernels for few rows read weights as tensor-core fragments.

    `block_n` weight rows of a tile, `warps` (the width is split over them), `step` elements of the width that a warp takes at
    once, `ahead` and `x_ahead` steps whose weights and activations are loaded ahead, `maxnreg` registers a thread (0: the
    compiler's).

    Left alone, ptxas aims at more programs a multiprocessor than the loads in flight leave room for, and orders the loads to
    save registers.

    `carveout` is the share, in percent, of the most shared memory a multiprocessor can have that launches prefer, -1 the
    driver's choice; the rest is L1 cache. A multiprocessor must drain before that changes, so where kernels of
    consecutive launches have the same, they can lie beside each other; where not, it hangs on what else they ask for.
    """

    block_n: Annotated[int, msgspec.Meta(ge=16, le=128)]
    warps: _Warps
    step: Annotated[int, msgspec.Meta(ge=32, le=1024)]
    ahead: Annotated[int, msgspec.Meta(ge=1, le=64)]
    x_ahead: Annotated[int, msgspec.Meta(ge=1, le=64)]
    maxnreg: _Registers
    carveout: _Carveout = -1

    def __post_init__(self) -> None:
        _check_powers(block_n=self.block_n, warps=self.warps, step=self.step)


class Tile(_Record, frozen=True, kw_only=True, tag_field="form", tag="tile"):
    """How programs of a tiled product work: output rows `m` and columns `n`, the step `k` along the width, warps, stages."""

    m: _Side
    n: _Side
    k: _Side
    warps: _Warps
    stages: _Stages

    def __post_init__(self) -> None:
        _check_powers(m=self.m, n=self.n, k=self.k, warps=self.warps)


class Splits(_Record, frozen=True, kw_only=True, tag_field="form", tag="splits", omit_defaults=True):
    """How contexts are cut, and how programs take the pieces: `tile_bytes` of keys at once, warps, `programs` a
    multiprocessor, the tiles of the `longest` split and those for each of which there may be one (`shortest`), stages,
    `maxnreg` registers a thread (0: the compiler's), `carveout` as of `Fragments`."""

    tile_bytes: Annotated[int, msgspec.Meta(ge=1024, le=65536)]
    warps: _Warps
    programs: Annotated[int, msgspec.Meta(ge=1, le=32)]
    longest: _Count
    shortest: _Count
    stages: _Stages
    maxnreg: _Registers
    carveout: _Carveout = -1

    def __post_init__(self) -> None:
        _check_powers(tile_bytes=self.tile_bytes, warps=self.warps)
        if self.shortest > self.longest:
            raise ValueError(f"shortest is {self.shortest}, more than longest, {self.longest}")


class Queries(_Record, frozen=True, kw_only=True, tag_field="form", tag="queries"):
    """How programs of prefill attention work: `rows` of queries and `tile` keys at once, warps, stages."""

    rows: Annotated[int, msgspec.Meta(ge=16, le=128)]
    tile: Annotated[int, msgspec.Meta(ge=16, le=128)]
    warps: _Warps
    stages: _Stages

    def __post_init__(self) -> None:
        _check_powers(rows=self.rows, tile=self.tile, warps=self.warps)


Parameters = Fragments | Tile | Splits | Queries

FORMS: dict[str, type[Fragments] | type[Tile] | type[Splits] | type[Queries]] = {
    "attention_decode": Splits,
    "attention_prefill": Queries,
    "linear_few": Fragments,
    "linear_many": Tile,
    "linear_rope": Fragments,
    "linear_silu": Fragments,
}
"""The kernels whose launch rules take configurations from tables, and the form of those."""
KINDS: dict[str, tuple[str, ...]] = {
    "attention_decode": ("single", "grouped"),
    "attention_prefill": ("single", "grouped"),
    "linear_few": ("middle", "narrow", "tall", "deep"),
    "linear_many": ("middle", "narrow", "tall", "deep"),
    "linear_rope": ("middle", "narrow", "tall", "deep"),
    "linear_silu": ("middle", "narrow", "tall", "deep"),
}
"""Kinds of shape, by kernel: of a matrix, or whether query heads share their keys."""


class Measured(_Record, frozen=True, kw_only=True):
    """Microseconds of a whole step with the configuration that was there before, and with this one; what else the step had
    was the same. `launches` of the kernel in this place were in the step.

    Both are with the carve-out and the residency of the step in the end: kernels change these together, and what that gains is
    in no entry.
    """

    before_us: _Time
    us: _Time
    launches: _Count


class Entry(_Record, frozen=True, kw_only=True):
    """A configuration and where it holds.

    An entry is for one exact shape `sizes`, or for every shape of a `kind` (then `sizes` is empty), and for buckets of `rows`:
    a bucket without an entry of its own takes one for about as many (up to 8, or up to the same power of two). With a kind, 0
    rows are any number. `bits` are those of an element. Sizes are [N, K] of a weight matrix (gate and up rows together, or
    query, key and value rows), or [heads, kv_heads, head_dim]. `measured` is None where it was not measured on its own.
    """

    kernel: str
    bits: Literal[16, 32]
    rows: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    sizes: tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 31)], ...] = ()
    kind: str = ""
    parameters: Parameters
    measured: Measured | None = None

    def __post_init__(self) -> None:
        if self.kernel not in FORMS:
            raise ValueError(f"kernel {self.kernel!r} is not one of {', '.join(FORMS)}")
        if not isinstance(self.parameters, FORMS[self.kernel]):
            raise ValueError(f"{self.kernel} does not take parameters of this form")
        if isinstance(self.parameters, Fragments) and self.bits != 16:
            raise ValueError(f"{self.kernel} has fragments of 16 bits alone")
        if bool(self.sizes) == bool(self.kind):
            raise ValueError("an entry has sizes or a kind, and not both")
        if self.kind and self.kind not in KINDS[self.kernel]:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(KINDS[self.kernel])}")
        if self.sizes and not self.rows:
            raise ValueError("an entry with sizes is for a number of rows; rows 0, any number, goes with a kind")
        if self.sizes and len(self.sizes) != (count := 3 if self.kernel.startswith("attention") else 2):
            raise ValueError(f"{len(self.sizes)} sizes, a shape of {self.kernel} has {count}")

    @property
    def place(self) -> str:
        """Where it holds, for people."""
        shape = " × ".join(map(str, self.sizes)) or self.kind
        return f"{self.kernel}, {self.bits} bits, {shape}, {self.rows or 'any number of'} rows"


class Residency(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """What launches of a kernel ask for in `recurrent` of mode dense and in `coda`, for just `rows` rows of a model with
    elements of `bits` bits: `carveout` as of `Fragments`, and at least `shared` bytes of shared memory a block. `kind` is that
    of an entry, where tables have entries for the kernel.

    Both together say, with the registers, how a multiprocessor is divided for a launch and so which other launches may begin
    beside it. No image depends on them, and a step's results do not.
    """

    kernel: str
    bits: Literal[16, 32]
    rows: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kind: str = ""
    carveout: _Carveout = -1
    shared: _Shared = 0

    def __post_init__(self) -> None:
        kinds = KINDS.get(self.kernel, ())
        if self.kind and not kinds:
            raise ValueError(f"{self.kernel} has no kinds, and kind is {self.kind!r}")
        if self.kind and self.kind not in kinds:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(kinds)}")

    @property
    def place(self) -> str:
        """Where it holds, for people."""
        return ", ".join(filter(None, (self.kernel, f"{self.bits} bits", self.kind, f"{self.rows} rows")))


class TuningTable(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """Configurations for one architecture.

    `source` says in words where they come from. `device` is the GPU they were measured on with `toolchain` (name, version),
    None and empty where nothing was measured. `context` is the number of tokens that decode rows had then, 0 if none.
    """

    schema: Literal["ouro-tuning/1"] = stored("ouro-tuning/1")
    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    arch: str
    source: str
    device: DeviceRecord | None = stored(None)
    toolchain: tuple[tuple[str, str], ...] = stored(())
    context: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = stored(0)
    entries: tuple[Entry, ...]
    residency: tuple[Residency, ...] = ()

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"arch {self.arch!r} is not one of {', '.join(ARCHITECTURES)}")
        for name, listed in (("entries", self.entries), ("residency", self.residency)):
            seen: set[str] = set()
            for at, place in enumerate(item.place for item in listed):
                if place in seen:
                    raise ValueError(f"{name}[{at}] is the second for {place}")
                seen.add(place)

    @property
    def digest(self) -> str:
        """sha256 of its canonical form: how the file is laid out does not change it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class TuningRecord(_Record, frozen=True, kw_only=True):
    """A table that launch rules chose from. `match`: it is of the part's own architecture, or of the nearest that has one."""

    name: str
    arch: str
    digest: str
    match: Literal["exact", "nearest"]


def encode_table(table: TuningTable) -> bytes:
    """The table as JSON: a line for what holds for all of it, then a line an entry, in a fixed order."""
    entries = sorted(table.entries, key=lambda e: (e.kernel, e.bits, e.sizes, e.kind, e.rows))
    residency = sorted(table.residency, key=lambda r: (r.rows, r.bits, r.kernel, r.kind))
    head = msgspec.json.encode(msgspec.structs.replace(table, entries=(), residency=()))
    head = head.removesuffix(b"[]}")
    return head + _lines(entries) + (b',"residency":' + _lines(residency) if residency else b"") + b"}\n"


def _lines(records: Sequence[_Record]) -> bytes:
    return b"[\n" + b",\n".join(map(msgspec.json.encode, records)) + b"\n]"


def decode_table(raw: bytes, where: str) -> TuningTable:
    """Read a table strictly. Raises UsageError naming the field."""
    hint = "Write it with ouro-artifact tune; artifacts/schemas/tuning.json describes it."
    if len(raw) > _MOST_BYTES:
        raise UsageError(f"{len(raw)} bytes, at most {_MOST_BYTES} expected", where=where, hint=hint)
    parse_object(raw, where, UsageError, hint)  # repeated keys
    try:
        return msgspec.json.decode(raw, type=TuningTable)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"not a tuning table: {error}", where=where, hint=hint) from error


def _check_powers(**values: int) -> None:
    for name, value in values.items():
        if value & (value - 1):
            raise ValueError(f"{name} is {value}, no power of two")
