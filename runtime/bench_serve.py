"""A load measured: a closed loop of requests over the engine, each replaced when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ouro_build.artifacts.bench_records import HostTime, Latency, ServeBenchRecord, ServeLine
from ouro_build.artifacts.errors import UsageError
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.machine import device_record, probe
from ouro_build.runtime.sample_text import SampleText
from ouro_build.runtime.timing import percentiles
from ouro_build.runtime.worker import Worker


@dataclass(frozen=True)
class Load:
    """`requests` requests of `input` prompt tokens and `output` new ones, `concurrency` of them at once."""

    concurrency: int
    requests: int
    input: int
    output: int


def bench_serve(
    worker: Worker, loads: Sequence[Load], seed: int, device: int = 0, say: Callable[[str], None] = lambda text: None
) -> ServeBenchRecord:
    """Run every load on `worker`, which serves nothing else, from places of real text that `seed` chooses.

    Stop tokens do not end a request. `say` is told what is being done. Raises UsageError for a load that there is no room for,
    before any of them runs; DeviceError if the device fails.
    """
    for load in loads:
        check_load(worker, load)
    lines = []
    for load in loads:
        say(f"{load.requests} requests, {load.concurrency} at once")
        lines.append(_Loop(worker, load, seed).run())
    return ServeBenchRecord(
        identity=worker.artifact.identity,
        executor=worker.executor,
        sparse=worker.sparse,
        device=device_record(probe(device)) if worker.path.on_device else None,
        seed=seed,
        lines=tuple(lines),
        notes=worker.notes,
    )


def check_load(worker: Worker, load: Load) -> None:
    """Raise UsageError unless `worker` has room for all requests of `load` that run at once."""
    geometry, blocks = worker.steps.geometry, worker.steps.kv_blocks
    length = load.input + load.output
    if length > geometry.max_context:
        what = f"{load.input} and {load.output} tokens exceed the artifact's context of {geometry.max_context}"
        raise UsageError(what, where="--input, --output", hint="Take fewer, or build with a larger --max-context.")
    if load.concurrency > worker.max_requests:
        what = f"{load.concurrency} is more than the {worker.max_requests} requests that the artifact was built for"
        raise UsageError(what, where="--concurrency", hint="Take fewer, or build with a larger --max-requests.")
    needed = load.concurrency * -(-length // geometry.block_size)
    if needed > blocks:
        what = f"{load.concurrency} requests of {length} tokens need {needed} KV blocks, there is room for {blocks} here"
        raise UsageError(what, where="--concurrency", hint="Take fewer requests at once, or shorter ones.")


class _Loop:
    """One load: `times` of every request's tokens, seconds on one clock, the submission first."""

    def __init__(self, worker: Worker, load: Load, seed: int) -> None:
        self._worker, self._load = worker, load
        text = SampleText(worker.steps.model.vocab_size)
        prompts = text.prompts(load.requests, load.input, seed)
        self._to_come: Iterator[Request] = iter([Request(prompt, load.output) for prompt in prompts])
        self._times: dict[Request, list[float]] = {}
        self._engine: Engine = worker.engine(on_tokens=self._got)

    def run(self) -> ServeLine:
        """Serve all of it."""
        self._worker.clear_coverage()
        began = time.perf_counter()
        for _ in range(self._load.concurrency):
            self._submit(began)
        self._engine.run()
        return self._line(max(times[-1] for times in self._times.values()) - began)

    def _submit(self, now: float) -> None:
        request = next(self._to_come, None)
        if request is not None:
            self._times[request] = [now]
            self._engine.submit(request)

    def _got(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        for request in requests:
            self._times[request].append(now)
            if request.finish_reason is not None:
                self._submit(now)

    def _line(self, seconds: float) -> ServeLine:
        load, host, coverage = self._load, self._engine.host, self._worker.coverage()
        times = np.array(list(self._times.values()))
        other = seconds - host.submit - host.wait
        return ServeLine(
            concurrency=load.concurrency,
            requests=load.requests,
            input=load.input,
            output=load.output,
            seconds=seconds,
            output_tokens_s=load.requests * load.output / seconds,
            total_tokens_s=load.requests * (load.input + load.output) / seconds,
            requests_s=load.requests / seconds,
            ttft_ms=_latency((times[:, 1] - times[:, 0]).tolist()),
            itl_ms=_latency(np.diff(times[:, 1:]).reshape(-1).tolist()),
            steps=host.steps,
            host=HostTime(
                submit_us=host.submit / host.steps * 1e6,
                wait_us=host.wait / host.steps * 1e6,
                other_us=max(0.0, other) / host.steps * 1e6,
            ),
            share=coverage.share,
            padded_share=coverage.padded_share,
            coverage=coverage,
        )


def _latency(seconds: Sequence[float]) -> Latency:
    """In milliseconds; zeros where there is nothing, as between the tokens of requests that get one."""
    values = [s * 1e3 for s in seconds] or [0.0]
    points = percentiles(values, (50, 95, 99))
    return Latency(mean=float(np.mean(values)), p50=points["50"], p95=points["95"], p99=points["99"], max=max(values))
