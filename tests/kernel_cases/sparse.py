"""Attention programs of every mode over a paged context: the launches that a build records, run one by one over tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Buffer, Launch, Plan, ProgramKey
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.rows import RECORD, Mode
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.record import Recorder
from ouro_build.builder.sparse import SparseAttention
from ouro_build.kernels import registry
from tests.kernel_cases import PART, normal
from tests.kernel_cases.attention import LAYER, LAYERS, LOOPS, Context, context
from tests.kernel_harness import Values, buffer, compare, poisoned, row_records, run_source

Tensors = dict[str, Tensor]
Run = Callable[[Launch, Tensors, Values], None]
SOURCE, LATER = 1, 2
"""The loop that captures, and one that consumes."""
LENGTHS = (70, 40, 140)
"""Tokens of the context's requests."""


@dataclass(frozen=True)
class Row:
    """A row of a batch: its query's place, what it does in `mixed`, and its reference slot."""

    request: int
    position: int
    loop: int = SOURCE
    mode: Mode = Mode.CAPTURE
    slot: int = 0
    generation: int = 7


Rows = tuple[Row | None, ...]

# A hole first and in the middle; contexts of one token, of 13, on either side of a block's edge, of several tiles.
CAPTURED: Rows = (
    None, Row(0, 0, slot=3), Row(1, 12, slot=0), Row(1, 15, slot=5), None, Row(1, 16, slot=1), Row(2, 139, slot=4),
    Row(0, 63, slot=2),
)  # fmt: skip
CONSUMED: Rows = tuple(row and Row(row.request, row.position, LATER, row.mode, row.slot) for row in CAPTURED)
SLOTS = 6


class Scene:
    """A geometry with a context in it, tensors for every buffer but the programs' own, and the programs of every mode."""

    def __init__(
        self,
        dtype: str = "float32",
        device: str = "cpu",
        shape: tuple[int, int, int] = (1, 1, 16),
        retention: float = 0.3,
        *,
        block_size: int = 16,
        capacity: int = 0,
        max_context: int = 256,
        lengths: tuple[int, ...] = LENGTHS,
        ctx: Context | None = None,
        bucket: int = len(CAPTURED),
    ) -> None:
        heads, kv_heads, head_dim = shape
        self.dtype, self.device, self.shape, self.bucket = dtype, device, shape, bucket
        self.ctx = ctx or context(dtype, device, kv_heads, head_dim, block_size, lengths)
        counts = retained_counts(max_context, retention)
        self.capacity = capacity or int(counts[-1])
        self.geometry = Geometry(
            buckets=(bucket,), prefill_buckets=(), max_context=max_context, max_requests=len(lengths), block_size=block_size,
            sparse_modes=SPARSE_MODES, key_retention=retention, key_capacity=self.capacity, reference_slots=SLOTS,
        )  # fmt: skip
        self.model = ModelConfig(
            vocab_size=16, hidden_size=16, intermediate_size=16, layers=LAYERS, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, loops=LOOPS, max_position=max_context, rms_norm_eps=(1e-6).hex(), rope_theta=(1e6).hex(),
            tied_embeddings=False, dtype=dtype,
        )  # fmt: skip
        tables = buffer("block_tables", "int32", *self.ctx.tables.shape)
        made = make_buffers(self.model, self.geometry, {})
        self._buffers = replace(made, kv=self.ctx.kv_buffer, block_tables=tables)
        self.tensors: Tensors = {"kv": self.ctx.kv, "block_tables": self.ctx.tables}
        if made.references is not None:
            self.tensors |= {b.name: poisoned(b, device=device) for b in vars(made.references).values()}
            self.tensors["retained_counts"] = torch.from_numpy(counts.copy()).to(device)

    @property
    def remembered(self) -> Tensors:
        """Copies of what the reference slots hold."""
        return {name: self.tensors[name].clone() for name in self.tensors if name.startswith("reference_")}

    def plan(self, mode: str, variant: str = "") -> tuple[Plan, Buffer]:
        """The launches of one layer's attention, and where its output is."""
        heads, _, head_dim = self.shape
        recorder = Recorder(ProgramKey("recurrent", self.bucket, mode, variant))
        attention = SparseAttention(self.model, self.geometry, PART, self._buffers).of(mode, variant)
        q = buffer("q", self.dtype, self.bucket, heads, head_dim)
        out = attention(recorder, buffer("rows", "int32", self.bucket, RECORD))(q, LAYER)
        return recorder.plan(), out

    def run(self, rows: Rows, mode: str, variant: str = "", run: Run = run_source) -> Tensor:
        """Run the program over `rows`; what it remembers stays in `tensors`. Its output [bucket, heads, head_dim]."""
        heads, _, head_dim = self.shape
        tensors = self.tensors | self.inputs(rows)
        plan, out = self.plan(mode, variant)
        for launch in plan.launches:
            by_name = {name: self._tensor(found, tensors) for name, found in launch.buffers()}
            run(launch, by_name, self.ctx.values)
        return tensors[out.name].view(self.bucket, heads, head_dim)

    def inputs(self, rows: Rows) -> Tensors:
        """Row records and queries of `rows`. A query depends on its place in the context alone."""
        heads, _, head_dim = self.shape
        assert len(rows) == self.bucket
        fields = [row or Row(-1, -1, -1, Mode.DENSE, -1, -1) for row in rows]
        records = row_records(
            [-1 if row is None else i for i, row in enumerate(rows)], self.device,
            request=[r.request for r in fields], position=[r.position for r in fields], loop=[r.loop for r in fields],
            mode=[int(r.mode) for r in fields], reference_slot=[r.slot for r in fields],
            generation=[r.generation for r in fields],
        )  # fmt: skip
        q = poisoned(buffer("q", self.dtype, self.bucket, heads, head_dim), device=self.device)
        for i, row in enumerate(rows):
            if row is not None:
                place = (row.request << 17 | row.position) * LOOPS + row.loop
                q[i] = normal(self.device, self.dtype, heads, head_dim, seed=place)
        return {"rows": records, "q": q}

    def _tensor(self, found: Buffer, tensors: Tensors) -> Tensor:
        if found.name not in tensors:
            tensors[found.name] = poisoned(found, device=self.device)
        return tensors[found.name]


def checked(launch: Launch, tensors: Tensors, values: Values) -> None:
    """Compare the launch with its reference, then let its own results stand. It may read and write one tensor by two names."""
    got = compare(launch, tensors, values)
    for name in registry.kernel(launch.specialization.kernel).writes:
        if name in got:
            tensors[name].copy_(got[name])


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN is equal to itself in them."""
    return tensor.contiguous().view(torch.uint8)


class Batches:
    """Random batches with holes over a scene in which every slot holds something; what the slots hold is kept track of."""

    def __init__(self, random: Random, scene: Scene) -> None:
        self._random = random
        self._bucket = scene.bucket
        self._held = {row.slot: row for row in CAPTURED if row is not None}
        self._generation = 100

    def next(self) -> tuple[Rows, dict[str, list[int]]]:
        """Rows of every mode and loop, and which of them do what in `mixed`: the rows' places by uniform mode."""
        slots = self._random.sample(range(SLOTS), SLOTS)
        rows: list[Row | None] = []
        does: dict[str, list[int]] = {"dense": [], "capture": [], "consume": []}
        for place in range(self._bucket):
            what = self._random.choice(["hole", "dense", "capture", "consume"])
            if what in ("capture", "consume") and not slots:
                what = "hole"
            rows.append(None if what == "hole" else self._row(what, slots))
            if what != "hole":
                does[what].append(place)
        return tuple(rows), does

    def _row(self, what: str, slots: list[int]) -> Row:
        request = self._random.randrange(len(LENGTHS))
        row = Row(request, self._random.randrange(LENGTHS[request]), self._random.randrange(LOOPS), Mode.DENSE, slot=-1)
        if what == "dense":
            return replace(row, loop=0, mode=Mode.CAPTURE) if self._random.random() < 0.5 else row
        slot = slots.pop()
        if what == "capture":
            self._generation += 1
            self._held[slot] = replace(row, loop=SOURCE, mode=Mode.CAPTURE, slot=slot, generation=self._generation)
            return self._held[slot]
        forced = self._random.random() < 0.5
        loop, mode = (row.loop, Mode.CONSUME) if forced else (LATER, Mode.CAPTURE)
        return replace(self._held[slot], loop=loop, mode=mode)


def only(rows: Rows, chosen: Sequence[int]) -> Rows:
    """`rows` with holes for all but the `chosen`."""
    return tuple(row if i in chosen else None for i, row in enumerate(rows))


def check_batches(mixed: Scene, uniform: Scene, count: int, seed: int) -> None:
    """`mixed` gives what the programs of single modes give, bit for bit, row for row, and the slots come to hold the same.

    Both scenes' slots hold the rows of CAPTURED.
    """
    batches = Batches(Random(seed), mixed)
    for _ in range(count):
        rows, does = batches.next()
        variant = "" if does["capture"] else "no_capture"
        out = mixed.run(rows, "mixed", variant)
        holes = [i for i, row in enumerate(rows) if row is None]
        assert bits(out[holes]).eq(0xFF).all(), "an inactive row was written"
        for mode, places in does.items():
            want = uniform.run(only(rows, places), mode)
            assert bits(out[places]).equal(bits(want[places])), (mode, rows)
            assert not want[places].isnan().any(), (mode, rows)
        for name, held in uniform.remembered.items():
            assert bits(held).equal(bits(mixed.remembered[name])), (name, rows)
