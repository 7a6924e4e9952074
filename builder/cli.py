"""`ouro-build`: a model and a list of shapes become an artifact."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ouro_build.artifacts.console import Output, rich_console, run
from ouro_build.artifacts.errors import DeviceError
from ouro_build.artifacts.fit import Fit, Machine, fit
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.manifest import MemoryPlan
from ouro_build.artifacts.places import check_outside
from ouro_build.artifacts.publish import check_output
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.sizes import SIZE
from ouro_build.builder.budget import full_requests, size
from ouro_build.builder.output import facts, progress, stack, table
from ouro_build.builder.plan_target import Preparation, prepare
from ouro_build.builder.sparse_spec import SparseSpec, parse_modes
from ouro_build.builder.sparse_view import sparse_facts
from ouro_build.builder.spec import BLOCK_SIZES, DTYPES, BuildSpec, advised_buckets, find_parts, parse_buckets
from ouro_build.builder.tuned import read_tables
from ouro_build.runtime.paths import NO_CUDA, torch_has_cuda

if TYPE_CHECKING:
    from ouro_build.builder.build import Built


class PoolSize(msgspec.Struct, frozen=True):
    """A pool by name, in bytes."""

    pool: str
    bytes: int


class TargetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `--dry-run` and a finished build say of one part; sizes in bytes."""

    gpu: str
    arch: str
    budget: int
    reserve: int
    kv_blocks: int
    kv_bytes: int
    pools: list[PoolSize]
    full_requests: int
    plans: int
    launches: int
    images: int


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `ouro-build --json` prints. `path` and `identity` are empty where nothing was built."""

    path: str
    identity: str
    targets: list[TargetPlan]


@click.command()
@click.option("--model", required=True, metavar="SOURCE", help="A checkpoint folder, a hub id (org/name) or preset:NAME.")
@click.option(
    "--gpu", "gpus", required=True, multiple=True, metavar="NAME", help="A part (h200, rtx-5090, …) or sm_X; may be repeated."
)
@click.option(
    "--buckets",
    required=True,
    metavar="N,N,…|@C.json",
    help="Row counts of decode programs, ascending; or a coverage record, for those that `ouro-artifact advise` gives.",
)
@click.option(
    "-o", "output", required=True, type=click.Path(path_type=Path), metavar="OUT.ouro", help="Where to put the artifact."
)
@click.option("--prefill-buckets", default="16,128", show_default=True, metavar="N,N,…", help="Row counts of prompt chunks.")
@click.option("--max-context", type=int, help="Tokens of a request.  [default: min(4096, the model's)]")
@click.option("--max-requests", type=int, help="Requests at once.  [default: the largest bucket]")
@click.option(
    "--block-size", type=int, default=16, show_default=True, help=f"Tokens of a KV block: {', '.join(map(str, BLOCK_SIZES))}."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and activations.  [default: the checkpoint's]")
@click.option(
    "--sparse-modes",
    default="dense",
    show_default=True,
    metavar="MODE,…",
    help="Modes that decode loops are built in: dense,capture,consume,mixed.",
)
@click.option("--key-retention", type=float, metavar="R", help="Share of its keys that a sparse row attends to, 0 … 1.")
@click.option("--key-bucket", type=int, metavar="N", help="Keys a reference slot has room for.  [default: what is retained]")
@click.option("--reference-slots", type=int, metavar="N", help="Tokens remembered at once.  [default: one a request]")
@click.option("--reference-memory", type=SIZE, help="All that reference slots may take, e.g. 2GiB.")
@click.option("--memory", type=SIZE, help="All a worker may hold, e.g. 24GiB.  [default: the part's, less a reserve]")
@click.option(
    "--weights",
    type=click.Choice(["embed", "reference"]),
    default="embed",
    show_default=True,
    help="Put them in, or leave them out and record their digests.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of a preset's weights.")
@click.option(
    "--tuning",
    "tuning",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="TABLE.json",
    help="Configurations of kernels that ouro-artifact tune found; one for each architecture.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Compiler processes.  [default: one a core]")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), help="Compiled images between builds.  [default: the user's cache]"
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="Where to put what is observed on a GPU here.  [default: OUT.ouro.observed]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan; compile and write nothing.")
@click.option("--force", is_flag=True, help="Replace an artifact that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def cli(
    model: str,
    gpus: tuple[str, ...],
    buckets: str,
    output: Path,
    prefill_buckets: str,
    sparse_modes: str,
    key_retention: float | None,
    key_bucket: int | None,
    reference_slots: int | None,
    reference_memory: int | None,
    weights: str,
    tuning: tuple[Path, ...],
    workers: int | None,
    cache_dir: Path | None,
    record: Path | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
    **shape: Any,
) -> None:
    """Build an artifact: every kernel, every plan and every byte of memory that MODEL needs on each GPU."""
    out = Output(json=as_json)
    decode_buckets = _decode_buckets(buckets, shape, out)
    spec = BuildSpec(
        model=model,
        parts=find_parts(gpus),
        buckets=decode_buckets,
        prefill_buckets=parse_buckets(prefill_buckets, "--prefill-buckets"),
        embed_weights=weights == "embed",
        tuning=read_tables(tuning),
        sparse=SparseSpec(parse_modes(sparse_modes), key_retention, key_bucket, reference_slots, reference_memory),
        **shape,
    )
    if not dry_run:
        check_output(output, force=force)  # before a model is fetched for nothing
        if record is not None:
            check_outside(record, f"--record {record}")
    preparation = prepare(spec)
    for note in (note for target in preparation.targets for note in target.notes):
        out.say(note)
    if dry_run:
        out.data(BuildResult(path="", identity="", targets=_targets(preparation)), lambda result: _drawn(result, preparation))
        return
    built = _build(preparation, output, workers or os.cpu_count() or 1, cache_dir, force)
    for note in built.notes:
        out.say(note)
    result = BuildResult(path=str(output), identity=built.identity, targets=_targets(preparation))
    out.data(result, lambda _: _drawn(result, preparation))
    _warm(built, preparation, record, out)


def _decode_buckets(text: str, shape: dict[str, Any], out: Output) -> tuple[int, ...]:
    """The buckets that `--buckets` says. Where a record says them, so many requests run at once as it saw rows in a step."""
    if not text.startswith("@"):
        return parse_buckets(text, "--buckets")
    buckets, requests = advised_buckets(Path(text[1:]))
    if shape["max_requests"] is None:
        shape["max_requests"] = max(requests, buckets[-1])
    out.say(f"--buckets {','.join(map(str, buckets))} --max-requests {shape['max_requests']}, advised by {text[1:]}")
    return buckets


def main() -> None:
    """Entry point of the command."""
    run(cli)


def _build(preparation: Preparation, output: Path, workers: int, cache_dir: Path | None, force: bool) -> Built:
    # Imported here: the reference runtime is not needed to plan.
    from ouro_build.builder.build import Reporter, build
    from ouro_build.builder.cache import ImageCache, default_folder

    console = rich_console(sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("planning", total=None)

        def phase(name: str) -> None:
            bar.update(task, description=name)
            if not console.is_terminal:  # a log has no bar, and minutes without a word look like a hang
                console.print(name)

        report = Reporter(phase, lambda done, total: bar.update(task, completed=done, total=total))
        cache = ImageCache(cache_dir or default_folder())
        return build(preparation, output, cache=cache, workers=workers, force=force, report=report)


def _warm(built: Built, preparation: Preparation, record: Path | None, out: Output) -> None:
    """Check and time what was built, where this machine has a GPU that it was built for."""
    from ouro_build.runtime.machine import probe

    try:
        machine = probe()
    except DeviceError as error:
        machine = Machine.absent(error.what)
    # By the manifest that was written: what is at the path may by now be another build's, or half replaced by it.
    obstacle = _obstacle(machine, fit(built.manifest, machine))
    if obstacle:
        out.say(f"not warmed: {obstacle}")
        return
    artifact = open_artifact(built.path, "sizes")
    # Imported here: it needs a device.
    from ouro_build.builder.warm import warm

    folder = preparation.source.folder
    weights = None if preparation.spec.embed_weights else str(folder or preparation.spec.model)
    with progress("warming", shown=not out.json) as report:
        observed = warm(artifact, record or artifact.observed_path, weights=weights, progress=report)
    out.say(f"warmed {len(observed.keys)} graph keys on {machine.name}")


def _obstacle(machine: Machine, decision: Fit) -> str:
    """Why nothing can be warmed here; empty if it can."""
    if machine.reason:
        return machine.reason
    if not decision.accepted:
        return "; ".join(f"{t.target}: {refusal}" for t in decision.targets for refusal in t.refusals)
    return "" if torch_has_cuda() else NO_CUDA


def _targets(preparation: Preparation) -> list[TargetPlan]:
    return [
        TargetPlan(
            gpu=target.part.name,
            arch=target.part.arch,
            budget=target.memory.budget,
            reserve=target.memory.reserve,
            kv_blocks=target.memory.kv_blocks,
            kv_bytes=target.memory.kv_blocks * target.memory.kv_block_bytes,
            pools=[PoolSize(r.pool.name.lower(), r.bytes) for r in target.memory.pools],
            full_requests=full_requests(target.memory, preparation.geometry),
            plans=len(target.index.plans),
            launches=target.index.launches,
            images=len(target.index.specializations),
        )
        for target in preparation.targets
    ]


def _drawn(result: BuildResult, preparation: Preparation) -> RenderableType:
    geometry = preparation.geometry
    shown = [
        table(f"{t.part.name} ({t.part.arch})", ("memory", "size", ""), _memory_rows(t.memory, geometry))
        for t in preparation.targets
    ]
    about = [
        ("model", preparation.spec.model + (" (synthetic weights)" if preparation.source.record.synthetic else "")),
        ("dtype", preparation.source.model.dtype),
        ("buckets", f"{_joined(geometry.buckets)}; prompt chunks {_joined(geometry.prefill_buckets)}"),
        ("requests", f"{geometry.max_requests} of up to {geometry.max_context} tokens, blocks of {geometry.block_size}"),
        ("modes", _joined(geometry.sparse_modes)),
        *sparse_facts(preparation.source.model, geometry),
        *((f"for {t.gpu}", f"{t.plans} plans, {t.launches} launches, {t.images} images") for t in result.targets),
    ]
    done = [("path", result.path), ("identity", result.identity)] if result.identity else [("built", "nothing: dry run")]
    return stack(*shown, facts("", [*about, *done]))


def _memory_rows(memory: MemoryPlan, geometry: Geometry) -> list[tuple[str, str, str]]:
    rows = [("reserve", size(memory.reserve), "CUDA context, images, graphs")]
    rows += [(r.pool.name.lower(), size(r.bytes), "") for r in memory.pools]
    kv = f"{memory.kv_blocks} blocks: {full_requests(memory, geometry)} of {geometry.max_requests} requests at full context"
    rows.append(("kv", size(memory.kv_blocks * memory.kv_block_bytes), kv))
    rows.append(("total", size(memory.total), f"of {size(memory.budget)} (--memory)"))
    return rows


def _joined(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    main()
