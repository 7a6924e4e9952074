"""The buffers that outlive a program: weights, KV, state and what the host reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import KV_AXES, KvLayout
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import ALIGNMENT
from ouro_build.artifacts.plan import Buffer, Pool
from ouro_build.artifacts.rows import RECORD, ReferenceRecord
from ouro_build.kernels.read_pool import MOST_PROGRAMS


@dataclass(frozen=True)
class References:
    """What sparse rows remember, a slot after another, and the table of how many keys they retain.

    A slot's `records` and `mass` say what it holds: its keys, its attention's output and their contribution to that.
    """

    retained_counts: Buffer
    records: Buffer
    mass: Buffer
    keys: Buffer
    output: Buffer
    contribution: Buffer


@dataclass(frozen=True)
class Buffers:
    """Every buffer outside the workspace. Shapes are given where each is made, in `make_buffers`.

    `weights_pool` is all of the weights pool as one buffer of words, to be read as a whole. `references` is None where no row
    remembers anything.
    """

    weights: dict[str, Buffer]
    kv: Buffer
    row_state: Buffer
    hidden: Buffer
    gate_logits: Buffer
    exit_probability: Buffer
    block_tables: Buffer
    coda_batch: Buffer
    batch: Buffer
    inputs: Buffer
    logits: Buffer
    tokens: Buffer
    weights_pool: Buffer
    read_sums: Buffer
    references: References | None

    def weight(self, name: str, layer: int | None = None) -> Buffer:
        """A packed weight; `name` without `layers.N.` for a layer's."""
        return self.weights[name if layer is None else f"layers.{layer}.{name}"]


def make_buffers(model: ModelConfig, geometry: Geometry, weights: dict[str, Buffer]) -> Buffers:
    """Declare them, unplaced except the weights, whose places the packing has decided."""
    slots, rows, loops = geometry.slots, geometry.max_rows, model.loops
    bucket = geometry.buckets[-1]
    return Buffers(
        weights=weights,
        kv=Buffer("kv", Pool.KV, model.dtype, kv_layout(model, geometry).shape),
        row_state=Buffer("row_state", Pool.STATE, "int32", (slots, RECORD)),
        hidden=Buffer("hidden", Pool.STATE, model.dtype, (slots, model.hidden_size)),
        gate_logits=Buffer("gate_logits", Pool.STATE, "float32", (slots, loops)),
        exit_probability=Buffer("exit_probability", Pool.STATE, "float32", (slots, loops)),
        block_tables=Buffer("block_tables", Pool.STATE, "int32", (geometry.max_requests, geometry.table_width)),
        coda_batch=Buffer("coda_batch", Pool.IO, "int32", (bucket,)),
        batch=Buffer("batch", Pool.IO, "int32", (rows,)),
        inputs=Buffer("inputs", Pool.IO, "int32", (rows, RECORD)),
        logits=Buffer("logits", Pool.IO, "float32", (bucket, model.vocab_size)),
        tokens=Buffer("tokens", Pool.IO, "int32", (bucket,)),
        weights_pool=Buffer("weights", Pool.WEIGHTS, "int32", (_pool_bytes(weights) // 4,), 0),
        read_sums=Buffer("read_sums", Pool.IO, "int32", (MOST_PROGRAMS,)),
        references=_references(model, geometry) if geometry.references else None,
    )


def _references(model: ModelConfig, geometry: Geometry) -> References:
    places = (geometry.reference_slots, model.layers, model.heads)

    def buffer(name: str, dtype: str, *shape: int) -> Buffer:
        return Buffer(name, Pool.REFERENCES, dtype, shape)

    return References(
        retained_counts=buffer("retained_counts", "int32", geometry.max_context + 1),
        records=buffer("reference_records", "int32", *places[:2], len(ReferenceRecord)),
        mass=buffer("reference_mass", "float32", *places),
        keys=buffer("reference_keys", "int32", *places, geometry.key_capacity),
        output=buffer("reference_output", "float32", *places, model.head_dim),
        contribution=buffer("reference_contribution", "float32", *places, model.head_dim),
    )


def _pool_bytes(weights: dict[str, Buffer]) -> int:
    end = max((w.offset + w.bytes for w in weights.values()), default=0)
    return -(-end // ALIGNMENT) * ALIGNMENT


def kv_layout(model: ModelConfig, geometry: Geometry, axes: tuple[str, ...] = KV_AXES) -> KvLayout:
    """How the KV pool lies in memory; plane = loop * layers + layer."""
    planes = tuple(tuple(loop * model.layers + layer for layer in range(model.layers)) for loop in range(model.loops))
    return KvLayout(
        axes=axes,
        planes=planes,
        block_size=geometry.block_size,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
    )
