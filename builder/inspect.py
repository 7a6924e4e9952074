"""What is in an artifact: as values for tools, and drawn for people."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import RenderableType

from ouro_build.artifacts.columns import Columns, GraphEntry, PlanIndex
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import Manifest, TargetRecord
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Constant, Edge, Pool
from ouro_build.artifacts.reader import TOKENIZER, Artifact
from ouro_build.artifacts.tuning import TuningRecord
from ouro_build.builder.budget import size
from ouro_build.builder.output import facts, stack, table
from ouro_build.builder.sparse_view import sparse_facts


class ImageView(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled kernel: registers and spilled bytes a thread, shared bytes a block, the percentage of the most shared
    memory of a multiprocessor that launches prefer (-1: the driver's choice), bytes of its file."""

    kernel: str
    contract: int
    constants: dict[str, Constant]
    registers: int
    spills: int
    shared: int
    carveout: int
    num_warps: int
    bytes: int
    path: str


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's bytes, and the buffers that the plans have in it."""

    pool: str
    bytes: int
    buffers: int


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan: its key, how many kernels it launches, and how many of its dependencies are programmatic and how many full."""

    program: str
    bucket: int
    mode: str
    variant: str
    launches: int
    programmatic: int
    full: int


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """`times` runs of the plan of this key; `join` is `full` or `programmatic`."""

    plan: str
    times: int
    join: str


class GraphView(msgspec.Struct, frozen=True, kw_only=True):
    """A graph: its key, its kernel nodes, and its runs of plans, each with how it follows what is before it."""

    program: str
    bucket: int
    mode: str
    variant: str
    nodes: int
    steps: tuple[StepView, ...]


class TargetView(msgspec.Struct, frozen=True, kw_only=True):
    """What was built for one GPU. Memory in bytes."""

    part: str
    arch: str
    sm_count: int
    ptxas: str
    tuning: tuple[TuningRecord, ...]
    budget: int
    reserve: int
    kv_blocks: int
    kv_block_bytes: int
    pools: tuple[PoolView, ...]
    images: tuple[ImageView, ...]
    plans: tuple[PlanView, ...]
    graphs: tuple[GraphView, ...]


class ArtifactView(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact: the manifest's parts that describe it, as built-in values, and its targets."""

    identity: str
    format: str
    bytes: int
    files: int
    model: dict[str, Any]
    source: dict[str, Any]
    geometry: dict[str, Any]
    modes: tuple[str, ...]
    kv_digest: str
    weights: dict[str, Any]
    toolchain: dict[str, str]
    stop_ids: tuple[int, ...]
    tokenizer: bool
    targets: tuple[TargetView, ...]


def view(artifact: Artifact) -> ArtifactView:
    """What is in `artifact`. Raises ArtifactError if its plans are damaged."""
    m = artifact.manifest
    return ArtifactView(
        identity=artifact.identity,
        format=m.format,
        bytes=sum(f.bytes for f in m.files),
        files=len(m.files),
        model=msgspec.to_builtins(m.model),
        source=msgspec.to_builtins(m.source),
        geometry=msgspec.to_builtins(m.geometry),
        modes=m.modes,
        kv_digest=m.kv_digest,
        weights=msgspec.to_builtins(m.weights),
        toolchain=dict(m.toolchain),
        stop_ids=m.stop_ids,
        tokenizer=artifact.has(TOKENIZER),
        targets=tuple(_target(m, t, *artifact.plans(t)) for t in m.targets),
    )


def _target(manifest: Manifest, target: TargetRecord, index: PlanIndex, columns: Columns) -> TargetView:
    memory = target.memory
    return TargetView(
        part=target.part.name,
        arch=target.part.arch,
        sm_count=target.part.sm_count,
        ptxas=target.ptxas,
        tuning=target.tuning,
        budget=memory.budget,
        reserve=memory.reserve,
        kv_blocks=memory.kv_blocks,
        kv_block_bytes=memory.kv_block_bytes,
        pools=tuple(
            PoolView(pool=p.name.lower(), bytes=memory.pool_bytes(p), buffers=sum(b.pool is p for b in index.buffers))
            for p in Pool
        ),
        images=_images(manifest, target, index),
        plans=_plans(index, columns),
        graphs=tuple(_graph(index, graph) for graph in index.graphs),
    )


def _images(manifest: Manifest, target: TargetRecord, index: PlanIndex) -> tuple[ImageView, ...]:
    sizes = {f.path: f.bytes for f in manifest.files}
    return tuple(
        ImageView(
            kernel=specialization.kernel,
            contract=specialization.contract,
            constants=dict(specialization.constants),
            registers=image.registers,
            spills=image.spills,
            shared=max(image.shared, specialization.options.shared),
            carveout=specialization.options.carveout,
            num_warps=image.num_warps,
            bytes=sizes[image.path],
            path=image.path,
        )
        for specialization, image in zip(index.specializations, target.images, strict=True)
    )


def _plans(index: PlanIndex, columns: Columns) -> tuple[PlanView, ...]:
    found = []
    for entry in index.plans:
        launches = columns.launches[entry.first : entry.first + entry.launches]
        first = int(launches["first_dependency"][0]) if len(launches) else 0
        edges = columns.dependencies["edge"][first : first + int(launches["dependencies"].sum())]
        found.append(
            PlanView(
                program=entry.key.program,
                bucket=entry.key.bucket,
                mode=entry.key.mode,
                variant=entry.key.variant,
                launches=entry.launches,
                programmatic=int((edges == Edge.PROGRAMMATIC).sum()),
                full=int((edges == Edge.FULL).sum()),
            )
        )
    return tuple(found)


def _graph(index: PlanIndex, graph: GraphEntry) -> GraphView:
    steps = tuple(
        StepView(plan=str(index.plans[step.plan].key), times=step.times, join=step.join.name.lower()) for step in graph.steps
    )
    return GraphView(
        program=graph.key.program,
        bucket=graph.key.bucket,
        mode=graph.key.mode,
        variant=graph.key.variant,
        nodes=sum(index.plans[step.plan].launches * step.times for step in graph.steps),
        steps=steps,
    )


def draw(shown: ArtifactView) -> RenderableType:
    """The view for people."""
    return stack(facts("artifact", overview(shown)), *(part for target in shown.targets for part in _draw_target(target)))


def overview(shown: ArtifactView) -> list[tuple[str, object]]:
    """What the artifact is, by name."""
    m, g, w = shown.model, shown.geometry, shown.weights
    source = " ".join(str(v) for v in (shown.source["kind"], shown.source["name"]) if v)
    synthetic = f", synthetic weights, seed {shown.source['seed']}" if shown.source["synthetic"] else ""
    held = "embedded" if w["embedded"] else "by reference: give the worker --weights"
    return [
        ("identity", shown.identity),
        ("format", shown.format),
        ("files", f"{shown.files} files, {size(shown.bytes)}"),
        ("source", source + synthetic),
        ("model", f"{m['layers']} layers × {m['loops']} loops, hidden {m['hidden_size']}, {m['dtype']}"),
        ("heads", f"{m['heads']} query, {m['kv_heads']} key, of {m['head_dim']}"),
        ("vocabulary", m["vocab_size"]),
        ("buckets", g["buckets"]),
        ("prefill buckets", g["prefill_buckets"]),
        ("requests", f"{g['max_requests']} of up to {g['max_context']} tokens, blocks of {g['block_size']}"),
        ("modes", shown.modes),
        *sparse_facts(msgspec.convert(m, ModelConfig), msgspec.convert(g, Geometry)),
        ("KV layout", shown.kv_digest),
        ("weights", f"{len(w['tensors'])} tensors, {size(w['bytes'])}, {held}"),
        ("tokenizer", shown.tokenizer),
        ("stop ids", ", ".join(map(str, shown.stop_ids)) or "none"),
        ("toolchain", ", ".join(f"{name} {version}" for name, version in shown.toolchain.items())),
    ]


def _draw_target(t: TargetView) -> tuple[RenderableType, ...]:
    pools = [(p.pool, size(p.bytes), str(p.buffers)) for p in t.pools if p.bytes]
    pools.append(("reserve", size(t.reserve), "context, images, graphs"))
    held = t.reserve + sum(p.bytes for p in t.pools)
    blocks = f"{t.kv_blocks:,} KV blocks of {size(t.kv_block_bytes)}"
    plans = [(_name(p), p.bucket, p.launches, p.programmatic, p.full) for p in t.plans]
    graphs = [(_name(g), g.bucket, g.nodes, ", then ".join(map(_step, g.steps))) for g in t.graphs if _joins(g)]
    images = [
        (i.kernel, _constants(i), i.registers, i.spills, i.shared, percent_carved(i.carveout), i.num_warps, i.bytes)
        for i in t.images
    ]
    columns = ("kernel", "constants", "registers", "spills", "shared", "carve-out", "warps", "bytes")
    name = f"{t.part} ({t.arch}, {t.sm_count} SMs, ptxas {t.ptxas})"
    tables = [(r.name, r.arch, r.match, r.digest) for r in t.tuning]
    return (
        table(f"memory on {name}: {size(held)} of {size(t.budget)}, {blocks}", ("pool", "size", "buffers"), pools),
        table(
            f"tuning tables for {t.part}, in the order in which they were asked", ("name", "arch", "match", "digest"), tables
        ),
        table(f"plans for {t.part}", ("program", "bucket", "launches", "programmatic edges", "full edges"), plans),
        *((table(f"graphs of several runs for {t.part}", ("graph", "bucket", "nodes", "runs"), graphs),) if graphs else ()),
        table(f"images for {t.part}", columns, images),
    )


def percent_carved(carveout: int) -> str:
    """A carve-out for people; a dash where the driver chooses."""
    return "–" if carveout < 0 else f"{carveout} %"


def _name(shown: PlanView | GraphView) -> str:
    return "/".join(filter(None, (shown.program, shown.mode, shown.variant)))


def _joins(graph: GraphView) -> bool:
    return sum(step.times for step in graph.steps) > 1


def _step(step: StepView) -> str:
    return f"{step.times} × {step.plan} ({step.join})"


def _constants(image: ImageView) -> str:
    return " ".join(f"{name}={value}" for name, value in image.constants.items())
