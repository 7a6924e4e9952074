"""`ouro-worker bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ouro_build.artifacts.bench_records import Latency, ServeBenchRecord
from ouro_build.artifacts.console import Output
from ouro_build.artifacts.records import CoverageRecord, FallbackCount, encode_record
from ouro_build.artifacts.sizes import SIZE
from ouro_build.runtime.coverage import merged
from ouro_build.runtime.loading import Verification
from ouro_build.runtime.metrics_option import metrics_port, serving_metrics
from ouro_build.runtime.numbers import positive_numbers
from ouro_build.runtime.outputs import check_writable, write_output
from ouro_build.runtime.paths import Choice
from ouro_build.runtime.sparse_option import sparse_option

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ouro_build.runtime.worker import SparseChoice

_COLUMNS = (
    "at once", "requests", "s", "out tokens/s", "all tokens/s", "TTFT ms p50/p95/p99", "ITL ms p50/p95/p99", "coverage",
    "padded", "steps", "host µs submit/wait/other",
)  # fmt: skip
_FALLBACK_COLUMNS = ("program", "mode", "reason", "by", "rows at once", "times", "live rows")


@click.command("serve")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--concurrency", required=True, help="Requests at once, one number or several: 1,8,32.")
@click.option("--input", "prompt", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens that a request gets.")
@click.option("--requests", type=click.IntRange(min=1), help="Requests in all.  [default: twice as many as run at once]")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses where prompts begin in the text."
)
@click.option(
    "--executor",
    type=click.Choice(("auto", "graph", "launch", "reference")),
    default="auto",
    show_default=True,
    help="The path to take.",
)
@sparse_option
@click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME.")
@click.option("--memory", type=SIZE, help="All that the worker may hold on the device, e.g. 24GiB.")
@click.option("--verify", type=click.Choice(("full", "fast")), default="full", show_default=True, help="As of `run`.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device number.")
@click.option("--coverage-out", type=click.Path(path_type=Path), help="Write the coverage of all loads together here, as JSON.")
@metrics_port
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def serve_command(
    artifact: Path,
    concurrency: str,
    prompt: int,
    output: int,
    requests: int | None,
    seed: int,
    executor: Choice,
    sparse: SparseChoice,
    weights: str | None,
    memory: int | None,
    verify: Verification,
    device: int,
    coverage_out: Path | None,
    metrics_port: int | None,
    as_json: bool,
) -> None:
    """Serve a closed loop of requests over prompts of real text: each is replaced when it ends. Prefill and drain count."""
    from ouro_build.runtime.bench_serve import Load, bench_serve  # a worker that only runs should not load it
    from ouro_build.runtime.worker import load

    check_writable("--coverage-out", coverage_out)
    loads = [Load(c, requests or 2 * c, prompt, output) for c in positive_numbers(concurrency, "--concurrency")]
    out = Output(json=as_json)
    with (
        load(
            artifact, executor=executor, weights=weights, memory=memory, device=device, verify=verify, sparse=sparse
        ) as worker,
        serving_metrics(worker, metrics_port, out.say),
    ):
        record = bench_serve(worker, loads, seed, device, out.say)
    if coverage_out is not None:
        write_output(coverage_out, encode_record(merged([line.coverage for line in record.lines])))
    for note in record.notes:
        out.say(f"note: {note}")
    out.data(record, _drawn)


def _drawn(record: ServeBenchRecord) -> Group:
    from rich.console import Group

    coverage = merged([line.coverage for line in record.lines])
    shown = [_lines(record)]
    if coverage.keys:
        shown.append(_replays(coverage))
    if coverage.fallbacks:
        shown.append(_fallbacks(coverage))
    return Group(*shown)


def _replays(coverage: CoverageRecord) -> Table:
    from rich.table import Table

    shown = Table("program", "bucket", "mode", "replays", "live rows", "padded", title="coverage of all loads, by graph key")
    for key in coverage.keys:
        padded = key.padded_rows / (key.live_rows + key.padded_rows)
        name = f"{key.program}/{key.variant}" if key.variant else key.program
        shown.add_row(name, str(key.bucket), key.mode, str(key.replays), str(key.live_rows), f"{padded:.1%}")
    return shown


def _fallbacks(coverage: CoverageRecord) -> Table:
    """A line for every kind of fallback, whatever the numbers of rows that had it."""
    from rich.table import Table

    kinds: dict[tuple[str, str, str, str], list[FallbackCount]] = {}
    for miss in coverage.fallbacks:
        kinds.setdefault((miss.program, miss.mode, miss.reason.value, miss.path), []).append(miss)
    shown = Table(*_FALLBACK_COLUMNS, title="what did not run by one graph, of all loads")
    for kind, misses in kinds.items():
        rows = ", ".join(str(miss.rows) for miss in misses)
        shown.add_row(*kind, rows, str(sum(m.count for m in misses)), str(sum(m.count * m.rows for m in misses)))
    return shown


def _lines(record: ServeBenchRecord) -> Table:
    from rich.table import Table

    where = record.device.name if record.device else "the host"
    first = record.lines[0]
    how = "sparse" if record.sparse else "dense"
    title = f"{first.input} prompt tokens, {first.output} new ones, {how}, by {record.executor} on {where}"
    shown = Table(*_COLUMNS, title=title)
    for line in record.lines:
        host = line.host
        shown.add_row(
            str(line.concurrency), str(line.requests), f"{line.seconds:.2f}", f"{line.output_tokens_s:.1f}",
            f"{line.total_tokens_s:.0f}", _points(line.ttft_ms), _points(line.itl_ms), f"{line.share:.2%}",
            f"{line.padded_share:.1%}", str(line.steps), f"{host.submit_us:.0f}/{host.wait_us:.0f}/{host.other_us:.0f}",
        )  # fmt: skip
    return shown


def _points(latency: Latency) -> str:
    return f"{latency.p50:.2f}/{latency.p95:.2f}/{latency.p99:.2f}"
