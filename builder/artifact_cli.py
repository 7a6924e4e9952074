"""`ouro-artifact`: looks at artifacts, checks them, compares them, completes them.

Exit codes: 0 done, 1 failed (for `diff`: the artifacts differ), 2 wrong usage, 3 the artifact does not fit, 4 it is damaged.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from ouro_build.artifacts.console import Output, require_extra, run
from ouro_build.artifacts.errors import FitError, UsageError
from ouro_build.artifacts.manifest import encode_manifest, identity
from ouro_build.artifacts.places import check_outside
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import CoverageRecord
from ouro_build.artifacts.sizes import SIZE
from ouro_build.runtime.outputs import check_writable

_ARTIFACT = click.argument("artifact", type=click.Path(path_type=Path), metavar="ART")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_DEVICE = click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device number.")


@click.group()
def cli() -> None:
    """Look at artifacts, check them, compare them, complete them."""


@cli.command()
@_ARTIFACT
@_JSON
def inspect(artifact: Path, as_json: bool) -> None:
    """Say what is in an artifact: model, shapes, memory, plans, images."""
    from ouro_build.builder.inspect import draw, view

    Output(json=as_json).data(view(open_artifact(artifact, "sizes")), draw)


@cli.command()
@_ARTIFACT
@_JSON
def verify(artifact: Path, as_json: bool) -> None:
    """Check every byte of an artifact; exit 4 if any is wrong."""
    files = open_artifact(artifact, "full")
    found = {
        "identity": files.identity,
        "files": len(files.manifest.files),
        "bytes": sum(f.bytes for f in files.manifest.files),
    }
    Output(json=as_json).data(found, lambda v: f"{v['identity']}: {v['files']} files, {v['bytes']:,} bytes, all as listed")


@cli.command()
@_ARTIFACT
@click.option("--memory", type=SIZE, help="All that a worker may hold on the device, e.g. 24GiB.")
@_DEVICE
@_JSON
def fit(artifact: Path, memory: int | None, device: int, as_json: bool) -> int:
    """Say whether an artifact runs on this machine, and on which known GPUs; exit 3 if not on this one."""
    from ouro_build.builder.fit_view import draw, view
    from ouro_build.runtime.machine import probe

    manifest = open_artifact(artifact, "sizes").manifest
    found = view(manifest, probe(device), memory)
    Output(json=as_json).data(found, draw)
    return 0 if found.target is not None else FitError.exit_code


@cli.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@_JSON
def diff(a: Path, b: Path, as_json: bool) -> int:
    """Compare two artifacts field by field; exit 0 if they are equal, 1 if they differ."""
    from ouro_build.builder.diff import difference, draw

    found = difference(open_artifact(a, "sizes"), open_artifact(b, "sizes"))
    Output(json=as_json).data(found, draw)
    return 0 if found.equal else 1


@cli.command()
@_ARTIFACT
@click.option("--weights", required=True, help="Where the weights are: DIR, FILE or preset:NAME.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact to write.")
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@_JSON
def embed(artifact: Path, weights: str, output: Path, force: bool, as_json: bool) -> None:
    """Put the weights into an artifact that was built with --weights reference."""
    from ouro_build.builder.embed import embed as embed_weights

    manifest = embed_weights(open_artifact(artifact, "full"), weights, output, force=force)
    found = {
        "output": str(output),
        "identity": identity(encode_manifest(manifest)),
        "bytes": sum(f.bytes for f in manifest.files),
    }
    Output(json=as_json).data(found, lambda v: f"{v['output']}: {v['bytes']:,} bytes, identity {v['identity']}")


@cli.command()
@_ARTIFACT
@click.option("--record", type=click.Path(path_type=Path), help="Where the record goes; beside the artifact by default.")
@click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME.")
@_DEVICE
@_JSON
def warm(artifact: Path, record: Path | None, weights: str | None, device: int, as_json: bool) -> None:
    """Run every plan of an artifact on this machine, verify and time it, and record what was seen."""
    require_extra("reference", ("torch",), "ouro-artifact warm")
    from ouro_build.builder.output import progress
    from ouro_build.builder.warm import warm as warm_plans
    from ouro_build.builder.warm_view import draw

    files = open_artifact(artifact, "full")
    folder = files.observed_path if record is None else record
    check_outside(folder, f"--record {folder}")
    out = Output(json=as_json)
    with progress("warming", shown=not as_json) as report:
        observed = warm_plans(files, folder, weights=weights, device=device, progress=report)
    out.data(observed, draw)
    out.say(f"recorded in {folder}")


@cli.command()
@_ARTIFACT
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, metavar="TABLE.json", help="The table to write."
)
@click.option("--kernel", "kernels", multiple=True, help="Tune this kernel; may be repeated.  [default: all]")
@click.option(
    "--bucket", "buckets", multiple=True, type=int, help="Tune steps of so many rows; may be repeated.  [default: all]"
)
@click.option("--context", type=click.IntRange(min=1), help="Tokens of a decode row.  [default: min(1024, the artifact's)]")
@click.option("--tuning", "tables", multiple=True, type=click.Path(path_type=Path), help="A table to start from.")
@click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME.")
@click.option("--workers", type=click.IntRange(min=1), help="Compiler processes.  [default: one a core]")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Compiled images between runs.  [default: the user's cache]")
@_DEVICE
@_JSON
def tune(
    artifact: Path,
    output: Path,
    kernels: tuple[str, ...],
    buckets: tuple[int, ...],
    context: int | None,
    tables: tuple[Path, ...],
    weights: str | None,
    workers: int | None,
    cache_dir: Path | None,
    device: int,
    as_json: bool,
) -> None:
    """Try configurations of kernels in an artifact's own steps on this GPU, and write the fastest as a table for ouro-build."""
    check_writable("-o", output)
    require_extra("build", ("torch", "triton"), "ouro-artifact tune")
    from ouro_build.builder.cache import ImageCache, default_folder
    from ouro_build.builder.tune import TuneOptions
    from ouro_build.builder.tune import tune as tune_steps
    from ouro_build.builder.tune_view import draw
    from ouro_build.builder.tuned import read_tables

    out = Output(json=as_json)
    options = TuneOptions(
        cache=ImageCache(cache_dir or default_folder()),
        workers=workers or os.cpu_count() or 1,
        kernels=kernels,
        buckets=buckets,
        context=context,
        weights=weights,
        device=device,
        tables=read_tables(tables),
    )
    out.data(tune_steps(open_artifact(artifact, "full"), output, options, out.say), draw)


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path), metavar="[ART]", required=False)
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the report here, as one HTML page.")
@click.option("--startup", type=click.Path(path_type=Path), help="A worker's start-up record.")
@click.option("--coverage", type=click.Path(path_type=Path), help="A worker's coverage record.")
@click.option("--against", multiple=True, type=click.Path(path_type=Path), help="An older record, to compare; may be repeated.")
@click.option("--record", type=click.Path(path_type=Path), help="Where records of ART are; beside it by default.")
@click.option("--text", is_flag=True, help="Print the report, without charts.")
@_JSON
def report(
    artifact: Path | None,
    output: Path | None,
    startup: Path | None,
    coverage: Path | None,
    against: tuple[Path, ...],
    record: Path | None,
    text: bool,
    as_json: bool,
) -> None:
    """Report on an artifact, or on what a worker recorded: a page for a browser, or text."""
    from ouro_build.builder.output import write_file
    from ouro_build.builder.report.compose import compose
    from ouro_build.builder.report.sources import gather
    from ouro_build.builder.report.text import draw_text

    if output is None and not text and not as_json:
        raise UsageError("nowhere to put the report", where="ouro-artifact report", hint="Give -o FILE.html, --text or --json.")
    older = {f"--against {path}": path for path in against}
    check_writable("-o", output, {"--startup": startup, "--coverage": coverage, **older})
    opened = None if artifact is None else open_artifact(artifact, "sizes")
    gathered = gather(opened, record, startup, coverage, against)
    page, out = compose(gathered), Output(json=as_json)
    if output is not None:
        from ouro_build.builder.report.html import draw_html

        write_file(output, draw_html(page).encode())
        out.say(f"report written to {output}")
    if text or as_json:
        out.data(gathered, lambda _: draw_text(page))


@cli.command()
@click.argument("coverage", type=click.Path(path_type=Path), metavar="C.json")
@click.option("--max-graphs", type=click.IntRange(min=1), help="Decode graphs to build, at most.")
@click.option("--memory", type=SIZE, help="Device memory that decode graphs may take, e.g. 64MiB.")
@_JSON
def advise(coverage: Path, max_graphs: int | None, memory: int | None, as_json: bool) -> None:
    """Say which buckets would have wasted the least work on a recorded load.

    C.json is what `ouro-worker run --coverage-out` wrote. Without a budget, as many buckets are chosen as it was recorded with.
    """
    from ouro_build.builder.advise import advise as choose
    from ouro_build.builder.advise import draw, view
    from ouro_build.builder.record_files import read_record

    advice = choose(read_record(coverage, CoverageRecord), max_graphs, memory)
    Output(json=as_json).data(view(advice), draw)


def main() -> None:
    """The `ouro-artifact` command."""
    run(cli)


if __name__ == "__main__":
    main()
