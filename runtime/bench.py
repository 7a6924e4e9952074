"""Decoding measured: an artifact's programs are checked, and only if all are right is a step timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import msgspec

from ouro_build.artifacts.columns import PlanIndex
from ouro_build.artifacts.fit import Machine
from ouro_build.artifacts.manifest import Manifest
from ouro_build.artifacts.packing import INV_FREQ
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.records import BaselineLine, BenchCheck, BenchLine, BenchRecord, PromptBaseline
from ouro_build.runtime.baseline import NO_TORCH, check_baseline
from ouro_build.runtime.bench_prefill import Prompt, check_prompt, make_prompt_line, prompt_bucket, prompt_keys
from ouro_build.runtime.bench_step import ROWS_CONTEXT, DecodeStep, blocks_of, check_shape, read_rate
from ouro_build.runtime.dispatch import replays_of
from ouro_build.runtime.driver import open_driver
from ouro_build.runtime.executor import Executor
from ouro_build.runtime.load_time import load_time_values
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.machine import device_record, probe
from ouro_build.runtime.paths import NO_CUDA, Choice, WorkerPath, choose_path, torch_has_cuda
from ouro_build.runtime.placing import open_pools
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.scenes import blocks_needed
from ouro_build.runtime.snapshots import HostSnapshot, Snapshot, TorchSnapshot
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.timing import median_ms
from ouro_build.runtime.trial import Compared, Trial

CHECKED = ("recurrent", "coda")
"""Programs that are tried in every arrangement of live rows."""
_MOST_ERROR = 1e9
_ONCE = ("prelude", "coda", "sample", "advance")
_OUTSIDE_LOOPS = frozenset(("embedding", "lm_head", INV_FREQ))

Shape = tuple[int, int]
"""Rows, and the context that each of them has."""


def bench_decode(
    artifact: Artifact,
    shapes: Sequence[Shape],
    *,
    executor: Choice = "auto",
    weights: str | None = None,
    device: int = 0,
    prompts: Sequence[int] = (),
    baseline: bool = False,
    flags: tuple[str, str] = ROWS_CONTEXT,
    say: Callable[[str], None] = lambda text: None,
) -> BenchRecord:
    """Check the programs that decode steps of `shapes` and prompts of `prompts` tokens run, then time those steps and the
    prefill of those prompts; with `baseline` the same in torch.

    The record has no times if a check failed. `say` is told what is being done. Raises UsageError, naming the `flags` that said
    rows and context, for a shape that the artifact or this machine has no room for, MissingExtraError if the baseline lacks
    torch, FitError if the artifact does not fit, DeviceError if the device fails.
    """
    machine = probe(device)
    bench = Bench(artifact, choose_path(artifact.manifest, machine, executor, None), machine, weights, device)
    if baseline:
        check_baseline(bench.path)
    for rows, context in shapes:
        check_shape(artifact.manifest.geometry, rows, context, bench.path.kv_blocks, flags)
    for tokens in prompts:
        check_prompt(artifact.manifest.geometry, tokens, bench.path.kv_blocks)
    return bench.run(shapes, prompts, baseline, say)


def step_bytes(manifest: Manifest, rows: int, context: int) -> int:
    """Bytes that a decode step must read: the weights of a loop once a loop, the LM head, every row's keys and values."""
    model = manifest.model
    sizes = {tensor.name: tensor.bytes for tensor in manifest.weights.tensors}
    loop = sum(size for name, size in sizes.items() if name not in _OUTSIDE_LOOPS)
    head = sizes["embedding" if model.tied_embeddings else "lm_head"]
    return model.loops * loop + head + rows * context * model.kv_bytes_per_token


def step_launches(manifest: Manifest, index: PlanIndex, bucket: int) -> tuple[int, float]:
    """Kernels that a step launches, and those of a loop over the number of layers."""
    counts = {entry.key: entry.launches for entry in index.plans}
    loop = counts[ProgramKey("recurrent", bucket)]
    once = sum(counts[ProgramKey(program, bucket)] for program in _ONCE)
    return once + manifest.model.loops * loop, loop / manifest.model.layers


def make_line(manifest: Manifest, index: PlanIndex, shape: Shape, ms: float, read_tb_s: float | None) -> BenchLine:
    """What a step of `shape` that takes `ms` milliseconds amounts to."""
    rows, context = shape
    bucket = bucket_of(manifest, rows)
    moved = step_bytes(manifest, rows, context)
    launches, launches_layer = step_launches(manifest, index, bucket)
    rate = moved / ms / 1e9
    return BenchLine(
        rows=rows,
        bucket=bucket,
        context=context,
        ms=ms,
        bytes=moved,
        tb_s=rate,
        read_share=None if read_tb_s is None else rate / read_tb_s,
        launches=launches,
        launches_layer=launches_layer,
        tokens_s=rows / ms * 1e3,
    )


def bucket_of(manifest: Manifest, rows: int) -> int:
    """The bucket that `rows` rows are padded to."""
    return replays_of(rows, manifest.geometry.buckets)[0].bucket


def path_notes(path: WorkerPath) -> tuple[str, ...]:
    """What is to be known of a benchmark that takes `path`."""
    if path.executor != "reference":
        return path.notes
    why = "" if path.reason is None else f" ({path.reason.value})"
    only = f"only reference ran here{why}: it is checked against itself, and the times are its own, not those of graphs"
    return (*path.notes, only)


def check_of(
    program: str, bucket: int, found: Compared, *, mode: str = "dense", variant: str = "", context: int = 0
) -> BenchCheck:
    """What `found` says of a program, as a record."""
    return BenchCheck(
        program=program,
        bucket=bucket,
        mode=mode,
        variant=variant,
        context=context,
        patterns=found.patterns,
        executors=found.executors,
        bit_equal=found.bit_equal,
        error=None if found.error is None else min(found.error, _MOST_ERROR),
        right=found.right,
    )


@dataclass(frozen=True)
class Bench:
    """What is measured, and where."""

    artifact: Artifact
    path: WorkerPath
    machine: Machine
    weights: str | None
    device: int

    def run(self, shapes: Sequence[Shape], prompts: Sequence[int], baseline: bool, say: Callable[[str], None]) -> BenchRecord:
        """Check, and time what is right."""
        manifest, geometry = self.artifact.manifest, self.artifact.manifest.geometry
        say("checking programs in made-up states")
        buckets = sorted({bucket_of(manifest, rows) for rows, _ in shapes})
        keys = [ProgramKey(program, bucket) for bucket in buckets for program in CHECKED]
        keys = list(dict.fromkeys((*keys, *(prompt_keys(geometry, prompts) if prompts else ()))))
        with self.opened(blocks_needed(geometry, max(key.bucket for key in keys))) as pools:
            checks, unchecked = self.programs(pools, keys)
        checks += self._prompts(prompts, say)
        record = BenchRecord(
            identity=self.artifact.identity,
            target=self.path.target.part.name,
            executor=self.path.executor,
            device=device_record(self.machine) if self.path.on_device else None,
            unchecked=unchecked,
            checks=checks,
            read_bytes=manifest.weights.bytes,
            read_tb_s=None,
            lines=(),
            baseline=(),
            notes=path_notes(self.path),
        )
        if record.right:
            record = self._timed(record, shapes, prompts, say)
        if baseline and record.right:
            say("timing torch")
            steps, whole = self._baseline(shapes, prompts)
            read = self._torch_read_tb_s()
            record = msgspec.structs.replace(record, baseline=steps, prompt_baseline=whole, torch_read_tb_s=read)
        return record

    @contextmanager
    def opened(self, kv_blocks: int) -> Iterator[Pools]:
        """The artifact's pools with `kv_blocks` KV blocks."""
        path = replace(self.path, kv_blocks=kv_blocks)
        driver = open_driver(self.device) if path.on_device else None
        pools = open_pools(self.artifact, path, Loading(weights=self.weights), StartupClock(), driver)
        try:
            yield pools
        finally:
            pools.close()

    def programs(self, pools: Pools, keys: Sequence[ProgramKey]) -> tuple[tuple[BenchCheck, ...], str]:
        """Try `keys`, programs that take nearly all of the time; and say why there was no reference to compare with, if so."""
        reference, unchecked = self._reference(pools)
        trial = Trial(self.artifact.manifest, pools, reference, self.device)
        try:
            found = [(key, trial.compare(key)) for key in keys]
        finally:
            if reference is not None:
                reference.close()
        checks = [check_of(k.program, k.bucket, seen, mode=k.mode, variant=k.variant) for k, seen in found]
        return tuple(checks), unchecked

    def _prompts(self, prompts: Sequence[int], say: Callable[[str], None]) -> tuple[BenchCheck, ...]:
        """Check the prefill of whole prompts over a KV pool that has just room for the longest."""
        if not prompts:
            return ()
        model, geometry = self.artifact.manifest.model, self.artifact.manifest.geometry
        checks = []
        with self.opened(blocks_of(geometry, max(prompts))) as pools:
            snapshot: Snapshot
            snapshot = HostSnapshot(pools.memory) if self._lacks_torch() else TorchSnapshot(pools.memory, self.device)
            for tokens in prompts:
                say(f"checking the prefill of {tokens} tokens")
                found = Prompt(model, geometry, pools, tokens).compare(snapshot)
                checks.append(check_of("prompt", prompt_bucket(geometry, tokens), found, context=tokens))
        return tuple(checks)

    def _lacks_torch(self) -> str:
        """Why torch cannot work on the pools; empty if it can."""
        if find_spec("torch") is None:
            return NO_TORCH
        return NO_CUDA if self.path.on_device and not torch_has_cuda() else ""

    def _reference(self, pools: Pools) -> tuple[Executor | None, str]:
        lacking = self._lacks_torch()
        if lacking:
            return None, lacking
        from ouro_build.runtime.reference import ReferenceExecutor

        target = self.path.target
        multiprocessors = self.machine.sm_count if self.path.on_device else target.part.sm_count
        values = load_time_values(self.artifact.manifest.kv, pools.kv_blocks, multiprocessors)
        return ReferenceExecutor(*self.artifact.plans(target), pools.memory, values, self.device), ""

    def _timed(
        self, record: BenchRecord, shapes: Sequence[Shape], prompts: Sequence[int], say: Callable[[str], None]
    ) -> BenchRecord:
        """Check whole steps at their contexts, all of them, then time them, prompts and the reading of the weights."""
        manifest = self.artifact.manifest
        blocks = max(rows * blocks_of(manifest.geometry, context) for rows, context in [*shapes, *((1, t) for t in prompts)])
        with self.opened(blocks) as pools:
            checks = list(record.checks)
            for rows, context in shapes:
                say(f"checking a step of {rows} rows, context {context}")
                found = DecodeStep(manifest.model, manifest.geometry, pools, rows, context).compare()
                checks.append(check_of("step", bucket_of(manifest, rows), found, context=context))
            record = msgspec.structs.replace(record, checks=tuple(checks), notes=(*record.notes, *pools.every_note))
            if not record.right:
                return record
            say("timing")
            rate = read_rate(pools, record.read_bytes)
            lines = []
            for shape in shapes:
                ms = median_ms(DecodeStep(manifest.model, manifest.geometry, pools, *shape).seconds())
                lines.append(make_line(manifest, pools.index, shape, ms, rate))
            whole = []
            for tokens in prompts:
                ms = median_ms(Prompt(manifest.model, manifest.geometry, pools, tokens).seconds())
                whole.append(make_prompt_line(manifest.model, manifest.geometry, tokens, ms))
        return msgspec.structs.replace(record, read_tb_s=rate, lines=tuple(lines), prompts=tuple(whole))

    def _baseline(
        self, shapes: Sequence[Shape], prompts: Sequence[int]
    ) -> tuple[tuple[BaselineLine, ...], tuple[PromptBaseline, ...]]:
        from ouro_build.runtime.torch_baseline import time_decode, time_prefill

        model, lines = self.artifact.manifest.model, []
        for rows, context in shapes:
            took = time_decode(model, rows, context, self.device)
            lines.append(BaselineLine(rows=rows, context=context, eager_ms=took.eager_ms, graph_ms=took.graph_ms))
        whole = [PromptBaseline(tokens=tokens, eager_ms=time_prefill(model, tokens, self.device)) for tokens in prompts]
        return tuple(lines), tuple(whole)

    def _torch_read_tb_s(self) -> float:
        """The rate at which torch reads as many bytes as the weights take."""
        from ouro_build.runtime.torch_baseline import time_read

        size = self.artifact.manifest.weights.bytes
        return size / time_read(size, self.device) / 1e12
