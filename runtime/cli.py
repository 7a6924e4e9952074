"""`ouro-worker`: runs artifacts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import numpy as np

from ouro_build.artifacts.console import Output, run
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.records import CoverageRecord, decode_record, encode_record
from ouro_build.artifacts.sizes import SIZE
from ouro_build.runtime.loading import Verification
from ouro_build.runtime.metrics_option import metrics_port, serving_metrics
from ouro_build.runtime.outputs import check_writable, write_output
from ouro_build.runtime.paths import Choice
from ouro_build.runtime.selftest import SelfTest, self_test
from ouro_build.runtime.sparse_option import sparse_option
from ouro_build.runtime.start import Start
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.worker import Output as Generated
from ouro_build.runtime.worker import Prompt, SparseChoice, Worker, load

_BENCH = "bench"
_EXECUTORS = ("auto", "graph", "launch", "reference")


class _Commands(click.Group):
    """Loads `bench` only when it is asked for: a worker's start waits for every module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), _BENCH])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != _BENCH:
            return super().get_command(ctx, cmd_name)
        from ouro_build.runtime.bench_cli import bench

        return bench


@click.group(cls=_Commands)
def cli() -> None:
    """Run artifacts made by ouro-build."""


def _loading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--executor",
            type=click.Choice(_EXECUTORS),
            default="auto",
            show_default=True,
            help="The path to take; auto: the fastest that runs here.",
        ),
        click.option("--weights", help="Where the weights are, if not in the artifact: DIR, FILE or preset:NAME."),
        click.option("--memory", type=SIZE, help="All that the worker may hold on the device, e.g. 24GiB."),
        click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="CUDA device number."),
        click.option("--max-requests", type=click.IntRange(min=1), help="Requests that run at once.  [default: as built]"),
        click.option(
            "--verify",
            type=click.Choice(("full", "fast")),
            default="full",
            show_default=True,
            help="full: every byte. fast: all sizes, and the digests of all but the weights.",
        ),
        click.option(
            "--coverage-in",
            type=click.Path(path_type=Path),
            help="A record of --coverage-out: the graphs that it saw most are restored first.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    ):
        command = option(command)
    return click.argument("artifact", type=click.Path(path_type=Path))(command)


@cli.command("run")
@click.pass_obj
@_loading_options
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt as text; may be repeated.")
@click.option(
    "--prompt-ids", type=click.Path(path_type=Path), help="A JSON file with a list of token ids a prompt: [[1, 2], [3]]."
)
@click.option("--max-tokens", type=click.IntRange(min=1), required=True, help="Tokens to generate, at most.")
@click.option("--ignore-eos", is_flag=True, help="Go on past stop tokens.")
@click.option(
    "--feed-ids",
    type=click.Path(path_type=Path),
    help="Like --prompt-ids: a list a prompt; its tokens are fed in place of those generated.",
)
@click.option(
    "--logits", type=click.Path(path_type=Path), help="Write float32 logits here (safetensors), a tensor a prompt: 0, 1, …"
)
@click.option(
    "--coverage-out", type=click.Path(path_type=Path), help="Write what ran by graphs and what did not here, as JSON."
)
@sparse_option
@click.option(
    "--retained-mass",
    is_flag=True,
    help="Put a histogram of what captures retain into the coverage record. Costs a small copy a step.",
)
@click.option("--startup-out", type=click.Path(path_type=Path), help="Write where start-up time went here, as JSON.")
@metrics_port
def run_command(
    start: Start | None,
    artifact: Path,
    texts: tuple[str, ...],
    prompt_ids: Path | None,
    max_tokens: int,
    ignore_eos: bool,
    feed_ids: Path | None,
    logits: Path | None,
    coverage_out: Path | None,
    startup_out: Path | None,
    sparse: SparseChoice,
    retained_mass: bool,
    metrics_port: int | None,
    executor: Choice,
    weights: str | None,
    memory: int | None,
    device: int,
    max_requests: int | None,
    verify: Verification,
    coverage_in: Path | None,
    as_json: bool,
) -> None:
    """Continue prompts greedily; print a text a prompt, or its token ids where there is no tokenizer."""
    start = start or Start(StartupClock())
    if retained_mass and sparse == "off":
        raise UsageError("given beside --sparse off, which captures nothing", where="--retained-mass", hint="Leave one out.")
    if retained_mass and coverage_out is None:
        what = "it goes into the coverage record, and none is asked for"
        raise UsageError(what, where="--retained-mass", hint="Give --coverage-out FILE.")
    prompts = _prompts(texts, prompt_ids)
    feed = _id_lists(feed_ids, "--feed-ids") if feed_ids else []
    if feed and len(feed) != len(prompts):
        raise UsageError(f"{len(feed)} lists for {len(prompts)} prompts", where=f"--feed-ids {feed_ids}")
    written = {"--logits": logits, "--coverage-out": coverage_out, "--startup-out": startup_out}
    read = {"--prompt-ids": prompt_ids, "--feed-ids": feed_ids, "--coverage-in": coverage_in}
    for flag, path in written.items():
        check_writable(flag, path, written | read)
    coverage = _coverage(coverage_in)
    start.clock.until_now("arguments")
    with load(
        artifact,
        executor=executor,
        weights=weights,
        memory=memory,
        device=device,
        max_requests=max_requests,
        sparse=sparse,
        retained_mass=retained_mass,
        verify=verify,
        coverage=coverage,
        start=start,
    ) as worker:
        out = Output(json=as_json)
        with serving_metrics(worker, metrics_port, out.say):
            outputs = worker.generate(prompts, max_tokens, ignore_eos=ignore_eos, feed=feed, logits=logits is not None)
        out.data(_result(worker, outputs), lambda _: _drawn(outputs))  # first: what follows may fail
        if logits is not None:
            write_output(logits, _encode_logits(outputs))
        if coverage_out is not None:
            write_output(coverage_out, encode_record(worker.coverage()))
        if startup_out is not None:
            write_output(startup_out, encode_record(worker.startup()))
        _tell(out, worker)


@cli.command("selftest")
@click.pass_obj
@_loading_options
def selftest_command(start: Start | None, artifact: Path, coverage_in: Path | None, as_json: bool, **options: Any) -> int:
    """Decode the oracle, the prompt whose answer the build recorded, and compare; exit 1 if a clear choice differs."""
    out = Output(json=as_json)
    # sparse off: as the oracle was decoded
    with load(artifact, sparse="off", coverage=_coverage(coverage_in), start=start, **options) as worker:
        seen = self_test(worker)
        _tell(out, worker)
    out.data({**msgspec.to_builtins(seen), "passed": seen.passed}, lambda _: _verdict(seen))
    return 0 if seen.passed else 1


def _prompts(texts: tuple[str, ...], ids: Path | None) -> list[Prompt]:
    if bool(texts) == (ids is not None):
        raise UsageError("give either --prompt or --prompt-ids", where="prompt")
    return list(texts) if ids is None else list(_id_lists(ids, "--prompt-ids"))


def _id_lists(path: Path, flag: str) -> list[list[int]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[list[int]])
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=f"{flag} {path}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"not a JSON list of lists of token ids: {error}", where=f"{flag} {path}") from error


def _coverage(path: Path | None) -> CoverageRecord | None:
    if path is None:
        return None
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=f"--coverage-in {path}") from error
    return decode_record(raw, CoverageRecord, f"--coverage-in {path}")


def _encode_logits(outputs: list[Generated]) -> bytes:
    # Not the library's save_file: that replaces what is at the path, a device or a link too.
    from safetensors.numpy import save

    return save({str(i): np.stack(o.logits) for i, o in enumerate(outputs)})


def _result(worker: Worker, outputs: list[Generated]) -> dict[str, Any]:
    return {
        "outputs": [{"ids": o.ids, "text": o.text, "finish_reason": o.finish_reason, "depths": o.depths} for o in outputs],
        "executor": worker.executor,
        "sparse": worker.sparse,
        "coverage": worker.coverage(),
        "startup": worker.startup(),
    }


def _drawn(outputs: list[Generated]) -> str:
    return "\n".join(o.text if o.text is not None else json.dumps(o.ids) for o in outputs)


def _tell(out: Output, worker: Worker) -> None:
    """Which path ran, and what to know about it."""
    why = f" ({worker.path.reason.value})" if worker.path.reason else ""
    sparse = ", sparse" if worker.sparse else ""
    out.say(f"executor {worker.executor}{why}{sparse}, first token after {worker.startup().wall_s:.3f} s")
    for note in worker.notes:
        out.say(f"note: {note}")


def _verdict(seen: SelfTest) -> str:
    if not seen.clear:
        return f"self-test FAILED: none of the oracle's {seen.tokens} choices is clear, so nothing could be compared"
    verdict = "passed" if seen.passed else f"FAILED at steps {', '.join(map(str, seen.wrong))}"
    return f"self-test {verdict}: {seen.clear} clear choices of {seen.tokens} tokens, by {seen.executor}"


def main(start: Start | None = None) -> NoReturn:
    """Run the command line; `start` is what the entry point has begun already."""
    run(cli, obj=start)


if __name__ == "__main__":
    main()
