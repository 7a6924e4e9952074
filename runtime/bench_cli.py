"""`ouro-worker bench`: how fast an artifact runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from ouro_build.artifacts.console import Output
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import Artifact, open_artifact
from ouro_build.artifacts.records import BenchCheck, BenchRecord, SparseBenchRecord
from ouro_build.runtime.bench_serve_cli import serve_command
from ouro_build.runtime.bench_startup_cli import startup_command
from ouro_build.runtime.numbers import numbers
from ouro_build.runtime.paths import Choice

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ouro_build.runtime.bench import Shape

_CONTEXT = 1024
_COLUMNS = (
    "rows", "bucket", "context", "ms a step", "GB", "TB/s", "of reading", "launches", "a layer", "tokens/s", "torch eager ms",
    "torch graph ms",
)  # fmt: skip
_PREFILL_COLUMNS = ("tokens", "chunks", "ms", "tokens/s", "TFLOP/s", "torch eager ms", "torch tokens/s")

_SPARSE_COLUMNS = (
    "rows", "context", "keys", "attention dense ms", "sparse ms", "ratio", "dense of reading", "step dense ms", "sparse ms",
    "ratio", "dense of reading", "with mass ms",
)  # fmt: skip
AnyBench = TypeVar("AnyBench", BenchRecord, SparseBenchRecord)


@click.group("bench")
def bench() -> None:
    """Measure an artifact on this machine; nothing is timed that is not right."""


bench.add_command(serve_command)
bench.add_command(startup_command)


@bench.command("decode")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--rows", help="Row counts, e.g. 1,8.  [default: 1]")
@click.option(
    "--context",
    help="Tokens that every row has, one number or several: all with all --rows.  [default: min(1024, the artifact's)]",
)
@click.option("--shapes", help="ROWSxCONTEXT of every line instead, e.g. 1x1024,2x14600.")
@click.option("--prefill", help="Time the prefill of one prompt too, of so many tokens, e.g. 4096.")
@click.option("--executor", type=click.Choice(("auto", "graph", "launch", "reference")), default="auto", show_default=True,
              help="The path to take.")  # fmt: skip
@click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device number.")
@click.option("--baseline", type=click.Choice(("torch",)), help="Time the same step in torch too, on random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def decode_command(
    artifact: Path,
    rows: str | None,
    context: str | None,
    shapes: str | None,
    prefill: str | None,
    executor: Choice,
    weights: str | None,
    device: int,
    baseline: Literal["torch"] | None,
    as_json: bool,
) -> int:
    """Check the programs of decode steps, then time steps at every given number of rows and context, and prompts."""
    from ouro_build.runtime.bench import bench_decode  # a worker that only runs should not load it
    from ouro_build.runtime.bench_step import ROWS_CONTEXT

    prompts = [] if prefill is None else numbers(prefill, "--prefill")
    out = Output(json=as_json)
    opened = open_artifact(artifact, "all_but_weights")
    wanted = _shapes(rows, context, shapes, opened)
    record = bench_decode(
        opened, wanted, prompts=prompts, executor=executor, weights=weights, device=device, baseline=baseline is not None,
        flags=("--shapes", "--shapes") if shapes is not None else ROWS_CONTEXT, say=out.say,
    )  # fmt: skip
    return _show(out, record, _drawn)


@bench.command("sparse")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--rows", help="Row counts, e.g. 1,8.  [default with --context: 1,8]")
@click.option(
    "--context", help="Tokens that every row has, one number or several.  [default with --rows: min(1024, the artifact's)]"
)
@click.option("--executor", type=click.Choice(("auto", "graph", "launch", "reference")), default="auto", show_default=True,
              help="The path to take.")  # fmt: skip
@click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device number.")
@click.option("--retained-mass", is_flag=True, help="Also time a sparse step whose retained masses are copied to the host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def sparse_command(
    artifact: Path,
    rows: str | None,
    context: str | None,
    executor: Choice,
    weights: str | None,
    device: int,
    retained_mass: bool,
    as_json: bool,
) -> int:
    """Check every mode of the loops, then time sparse decoding against dense, attention alone and whole steps.

    Without --rows and --context: every usual shape that the artifact and this machine have room for.
    """
    from ouro_build.runtime.bench_sparse import bench_sparse  # a worker that only runs should not load it

    out = Output(json=as_json)
    opened = open_artifact(artifact, "all_but_weights")
    shapes = None
    if rows is not None or context is not None:
        shapes = list(product(numbers(rows or "1,8", "--rows"), _contexts(context, opened)))
    record = bench_sparse(
        opened, shapes, executor=executor, weights=weights, device=device,
        retained_mass=retained_mass, say=out.say,
    )  # fmt: skip
    return _show(out, record, _drawn_sparse)


def _show(out: Output, record: AnyBench, draw: Callable[[AnyBench], RenderableType]) -> int:
    """Print what a benchmark saw; the exit code."""
    for note in record.notes:
        out.say(f"note: {note}")
    if record.unchecked:
        out.say(f"not checked against the reference: {record.unchecked}")
    out.data(record, draw)
    if not record.right:
        out.say("a check failed, so nothing was timed; please report it, and do not deploy the artifact here")
    return 0 if record.right else 1


def _contexts(context: str | None, artifact: Artifact) -> Sequence[int]:
    """The contexts that were asked for; else 1,024 tokens, or what the artifact has room for."""
    return [min(_CONTEXT, artifact.manifest.geometry.max_context)] if context is None else numbers(context, "--context")


def _shapes(rows: str | None, context: str | None, shapes: str | None, artifact: Artifact) -> list[Shape]:
    """The (rows, context) of every line."""
    if shapes is None:
        return list(product(numbers("1" if rows is None else rows, "--rows"), _contexts(context, artifact)))
    if rows is not None or context is not None:
        raise UsageError("given beside --rows or --context", where="--shapes", hint="Give one or the other.")
    try:
        found = [(int(left), int(right)) for left, _, right in (item.partition("x") for item in shapes.split(","))]
    except ValueError as error:
        hint = "Write it like --shapes 1x1024,2x14600"
        raise UsageError(f"{shapes!r} is not a list of rows and contexts", where="--shapes", hint=hint) from error
    return list(dict.fromkeys(found))


def _drawn_sparse(record: SparseBenchRecord) -> RenderableType:
    """The times, or the checks where one failed."""
    if not record.right:
        return "\n".join(map(_check_text, record.checks))
    from rich.table import Table

    kept = f"{record.key_retention:g} of the keys retained"
    title = f"sparse over dense by {record.executor} on {_where(record)}, {kept}{_reading(record)}"
    shown = Table(*_SPARSE_COLUMNS, title=title)
    for line in record.lines:
        mass = "–" if line.mass_ms is None else f"{line.mass_ms:.3f}"
        shown.add_row(
            str(line.rows), str(line.context), str(line.retained), f"{line.attention_dense_ms:.3f}",
            f"{line.attention_sparse_ms:.3f}", f"{line.attention_ratio:.3f}", _share(line.attention_dense_share),
            f"{line.dense_ms:.3f}", f"{line.sparse_ms:.3f}", f"{line.ratio:.3f}", _share(line.dense_share), mass,
        )  # fmt: skip
    return shown


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _drawn(record: BenchRecord) -> RenderableType:
    """The times, or the checks where one failed."""
    if not record.right:
        return "\n".join(map(_check_text, record.checks))
    from rich.console import Group

    return Group(_decode_table(record), *([_prefill_table(record)] if record.prompts else []))


def _decode_table(record: BenchRecord) -> RenderableType:
    from rich.table import Table

    shown = Table(*_COLUMNS, title=f"decode by {record.executor} on {_where(record)}{_reading(record)}{_torch_reading(record)}")
    torch_times = {(line.rows, line.context): line for line in record.baseline}
    for line in record.lines:
        torch = torch_times.get((line.rows, line.context))
        eager, graph = ("–", "–") if torch is None else (f"{torch.eager_ms:.2f}", f"{torch.graph_ms:.2f}")
        shown.add_row(
            str(line.rows), str(line.bucket), str(line.context), f"{line.ms:.3f}", f"{line.bytes / 1e9:.2f}",
            f"{line.tb_s:.3g}", _share(line.read_share), str(line.launches), f"{line.launches_layer:.1f}",
            f"{line.tokens_s:.0f}", eager, graph,
        )  # fmt: skip
    return shown


def _prefill_table(record: BenchRecord) -> RenderableType:
    from rich.table import Table

    shown = Table(*_PREFILL_COLUMNS, title=f"prefill of one prompt by {record.executor} on {_where(record)}")
    torch_times = {line.tokens: line.eager_ms for line in record.prompt_baseline}
    for line in record.prompts:
        torch = torch_times.get(line.tokens)
        beside = ("–", "–") if torch is None else (f"{torch:.2f}", f"{line.tokens / torch * 1e3:.0f}")
        shown.add_row(
            str(line.tokens), f"{line.chunks} × {line.bucket}", f"{line.ms:.3f}", f"{line.tokens_s:.0f}",
            f"{line.tflop_s:.3g}", *beside,
        )  # fmt: skip
    return shown


def _where(record: BenchRecord | SparseBenchRecord) -> str:
    return record.device.name if record.device else "the host"


def _reading(record: BenchRecord | SparseBenchRecord) -> str:
    """How fast the card's memory was read, where that was measured."""
    rate = record.read_tb_s
    return "" if rate is None else f", which reads {record.read_bytes / 1e9:.2f} GB at {rate:.3g} TB/s"


def _torch_reading(record: BenchRecord) -> str:
    """The same by torch.sum."""
    if record.torch_read_tb_s is None:
        return ""
    share = "" if record.read_over_torch is None else f", of which that is {record.read_over_torch:.3f}"
    return f" (torch.sum: {record.torch_read_tb_s:.3g} TB/s{share})"


def _check_text(check: BenchCheck) -> str:
    at = f", context {check.context}" if check.context else ""
    error = "not compared" if check.error is None else f"{check.error:.3g} tolerances"
    bits = "bit-equal" if check.bit_equal else "bits DIFFER"
    verdict = "right" if check.right else "WRONG"
    key = ProgramKey(check.program, check.bucket, check.mode, check.variant)
    seen = f"{bits} ({', '.join(check.executors)}; {check.patterns} patterns)"
    return f"{key}{at}: {verdict}; {seen}, reference: {error}"
