"""`ouro-worker bench startup`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ouro_build.artifacts.bench_records import FirstRequest, PhaseSummary, StartupBenchRecord
from ouro_build.artifacts.console import Output
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import StartupRecord, encode_record
from ouro_build.runtime.loading import Verification
from ouro_build.runtime.outputs import check_writable, write_output
from ouro_build.runtime.paths import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group
    from rich.table import Table

ALLOWED_EXCESS = 0.2
"""By what share a first request may take longer than the hundredth of its shape."""


@click.command("startup")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--num-iters-cold",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Starts after the page cache was dropped.",
)
@click.option(
    "--num-iters-warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Starts that are not counted."
)
@click.option(
    "--num-iters-warm", type=click.IntRange(min=1), default=3, show_default=True, help="Starts with the files in memory."
)
@click.option("--baseline", type=click.Choice(("torch",)), help="Start as many workers of torch too, with the same weights.")
@click.option("--output-json", type=click.Path(path_type=Path), help="Write the record here.")
@click.option(
    "--executor",
    type=click.Choice(("auto", "graph", "launch", "reference")),
    default="auto",
    show_default=True,
    help="The path to take.",
)
@click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME.")
@click.option("--verify", type=click.Choice(("full", "fast")), default="full", show_default=True, help="As of `run`.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device number.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def startup_command(
    artifact: Path,
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
    baseline: Literal["torch"] | None,
    output_json: Path | None,
    executor: Choice,
    weights: str | None,
    verify: Verification,
    device: int,
    as_json: bool,
) -> None:
    """Start fresh workers and time each to its first token; then the first request of every shape beside the hundredth."""
    from ouro_build.runtime.bench_startup import Iterations, bench_startup  # a worker that only runs should not load it

    check_writable("--output-json", output_json)
    out = Output(json=as_json)
    record = bench_startup(
        open_artifact(artifact, "sizes"),
        Iterations(num_iters_cold, num_iters_warmup, num_iters_warm),
        executor=executor,
        weights=weights,
        device=device,
        verify=verify,
        baseline=baseline is not None,
        say=out.say,
    )
    if output_json is not None:
        write_output(output_json, encode_record(record))
    for note in record.notes:
        out.say(f"note: {note}")
    out.data(record, _drawn)


def _drawn(record: StartupBenchRecord) -> Group:
    from rich.console import Group

    where = record.device.name if record.device else "the host"
    node = "" if record.node_us is None else f", {record.node_us:.1f} µs a node"
    return Group(
        f"start-up by {record.executor} on {where}, verification {record.verify}; cold by {record.cold_by}, "
        f"{record.cold_resident:.0%} of the artifact still in memory",
        _runs(record),
        f"{record.graphs} graphs of {record.nodes} nodes restored in {record.graphs_ms:.1f} ms{node}; phases account for "
        f"{record.accounted:.1%}",
        _phases(record.phases),
        _firsts(record.first_requests),
    )


def _runs(record: StartupBenchRecord) -> Table:
    from rich.table import Table

    shown = Table("start", "mean s", "median s", "least s", "most s", title="process start to first token")
    rows = [("cold", record.cold), ("warm", record.warm), ("torch", record.baseline)]
    for name, runs in rows:
        if runs:
            shown.add_row(name, *_spread(runs))
    return shown


def _spread(runs: Sequence[StartupRecord]) -> list[str]:
    times = sorted(r.wall_s for r in runs)
    half = len(times) // 2
    median = (times[half] + times[-half - 1]) / 2
    return [f"{value:.3f}" for value in (sum(times) / len(times), median, times[0], times[-1])]


def _phases(phases: Sequence[PhaseSummary]) -> Table:
    from rich.table import Table

    shown = Table("phase", "starts at s", "s", "MB", "GB/s", title="phases of warm starts, medians; ~ on another thread")
    for phase in phases:
        name = ("  " if phase.parent else "") + ("~ " if phase.beside else "") + phase.name
        rate = "–" if phase.rate is None else f"{phase.rate / 1e9:.2f}"
        shown.add_row(
            name, f"{phase.start_s:.3f}", f"{phase.seconds:.3f}", f"{phase.bytes / 1e6:.1f}" if phase.bytes else "–", rate
        )
    return shown


def _firsts(requests: Sequence[FirstRequest]) -> Table:
    from rich.table import Table

    shown = Table("step", "rows", "first ms", "hundredth ms", "median ms", "excess", title="first requests of a fresh worker")
    for r in requests:
        mark = " !" if r.excess > ALLOWED_EXCESS else ""
        shown.add_row(
            r.program, str(r.rows), f"{r.first_ms:.3f}", f"{r.hundredth_ms:.3f}", f"{r.median_ms:.3f}", f"{r.excess:+.0%}{mark}"
        )
    return shown
