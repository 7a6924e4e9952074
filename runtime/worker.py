"""A worker: an artifact in memory, ready to decode."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import ArtifactError, NoDeviceError, RequestError, UsageError
from ouro_build.artifacts.fit import Machine
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import TOKENIZER, Artifact, open_artifact
from ouro_build.artifacts.records import CoverageRecord, Reason, StartupRecord
from ouro_build.runtime.coverage import CoverageCounter
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.driver import Driver
from ouro_build.runtime.engine import Engine, FinishReason, Request
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.host_pools import open_host_pools
from ouro_build.runtime.machine import describe
from ouro_build.runtime.memory import Memory
from ouro_build.runtime.opening import OpeningDriver
from ouro_build.runtime.paths import Choice, WorkerPath, choose_path
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.step import Steps

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | Sequence[int]
SparseChoice = Literal["auto", "off"]
"""`auto` decodes sparsely where the artifact has sparse modes; `off` runs it dense."""


@dataclass(frozen=True)
class Output:
    """What became of one prompt. `text` leaves out a stop token and is None where the artifact has no tokenizer.

    `depths[i]` is the number of loops that token i had; `logits[i]`, float32 [vocab], is what it was chosen from, where
    logits were asked for.
    """

    ids: list[int]
    text: str | None
    finish_reason: FinishReason
    depths: list[int]
    logits: list[NDArray[np.float32]]


class Worker:
    """Decodes with a loaded artifact. Made by `load`; close it, or use it in a `with` block, to give its memory back.

    `steps` is the interface for a caller that schedules rows itself; `generate` schedules for callers that do not. The two
    share slots and KV blocks: use one or the other. `executor` names the path that runs, `path.reason` why it is not `graph`;
    `sparse` says whether `generate` decodes sparsely.
    One thread may use a worker, the one that loaded it: CUDA's context is current there.
    """

    def __init__(
        self,
        artifact: Artifact,
        path: WorkerPath,
        pools: Pools,
        clock: StartupClock,
        max_requests: int,
        *,
        sparse: bool = False,
        retained_mass: bool = False,
    ) -> None:
        self.artifact = artifact
        self.path = path
        self.max_requests = max_requests
        self.sparse = sparse
        self.memory: Memory = pools.memory
        self._pools = pools
        self._clock = clock
        self._coverage = CoverageCounter()
        self._tokenizer: Tokenizer | None = None
        manifest = artifact.manifest
        missing = dict.fromkeys(pools.failures, Reason.GRAPH_RESTORE_FAILED)
        self.steps = Steps(
            manifest.model,
            manifest.geometry,
            {b.name: b for b in pools.index.buffers},
            pools.memory,
            Dispatcher(pools.executors, self._coverage, path.reason, missing, pools.unbuilt),
            self._coverage,
            retained_mass=retained_mass,
        )
        # Every slot inactive, every table empty, and no output that could be taken for one.
        pools.memory.fill(Pool.STATE, 0xFF)
        pools.memory.fill(Pool.IO, 0xFF)

    @property
    def executor(self) -> ExecutorName:
        """The first path that programs take."""
        return self._pools.executors[0].name

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs here from what was planned, and the graphs that could not be restored: all is right, perhaps slower."""
        return (*self.path.notes, *self._pools.notes, *(f"{e.where}: {e.what}" for e in self._pools.failures.values()))

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        feed: Sequence[Sequence[int]] = (),
        logits: bool = False,
        depth: int | None = None,
        sparse: bool | None = None,
    ) -> list[Output]:
        """Continue each prompt greedily by up to `max_tokens` tokens, all of them batched together.

        A prompt is text, where the artifact carries a tokenizer, or token ids. `max_tokens` holds for each prompt; a stop token
        ends one earlier unless `ignore_eos`. `logits` keeps those of every token. `feed[i][j]` replaces generated token j of
        prompt i as the next input. `depth` is the number of loops a new token gets, all of them by default; prompts always
        get all. `sparse` overrides the worker's: new tokens' loops after the source loop attend to the keys that it retained.
        Raises RequestError for what can't be served, before any prompt starts; DeviceError if the device fails,
        with no output.
        """
        began = time.monotonic()
        first_token = partial(self._clock.first_token, began)
        loops = self.steps.loops(depth)
        if len(feed) > len(prompts):
            raise RequestError(f"{len(feed)} lists of tokens to feed, {len(prompts)} prompts")
        sparsely = self.sparse if sparse is None else sparse
        engine = Engine(self.steps, self._pools.kv_blocks, self.max_requests, loops, first_token, sparse=sparsely)
        stop = frozenset() if ignore_eos else frozenset(self.artifact.manifest.stop_ids)
        requests = [
            Request(self.encode(p), max_tokens, stop, feed[i] if i < len(feed) else (), logits) for i, p in enumerate(prompts)
        ]
        for at, request in enumerate(requests):
            try:
                engine.submit(request)
            except RequestError as error:
                raise RequestError(error.what, where=f"prompt {at}", hint=error.hint) from error
        engine.run()
        return [self._output(r, loops) for r in requests]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises RequestError for text that is none, or if the artifact carries no tokenizer."""
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self._load_tokenizer()
        if tokenizer is None:
            raise RequestError("the artifact carries no tokenizer", hint="Give token ids: --prompt-ids FILE.json")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not Unicode text: {error.reason} at character {error.start}") from error
        return list(tokenizer.encode(prompt).ids)

    def coverage(self) -> CoverageRecord:
        """What ran by graphs and what did not, so far; its `share` is that of decoded rows served by whole graphs.

        With the retained mass of every capture, where the worker was loaded to keep it; that waits for the last of them.
        """
        mass = self.steps.retained_mass
        return self._coverage.record(None if mass is None else mass.record())

    def startup(self) -> StartupRecord:
        """Start-up up to the first token."""
        return self._clock.record()

    def close(self) -> None:
        """Give back graphs, images and memory."""
        self._pools.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _output(self, request: Request, depth: int) -> Output:
        if request.finish_reason is None:
            raise RequestError("the request did not finish")
        # The first token comes from the prompt's last row, which ran every loop.
        depths = [self.steps.model.loops, *[depth] * (len(request.ids) - 1)]
        text = self._decode(request.ids[:-1] if request.finish_reason == "stop" else request.ids)
        return Output(request.ids, text, request.finish_reason, depths, request.logits)

    def _decode(self, ids: list[int]) -> str | None:
        tokenizer = self._load_tokenizer()
        return None if tokenizer is None else str(tokenizer.decode(ids))

    def _load_tokenizer(self) -> Tokenizer | None:
        raw = self.artifact.tokenizer() if self._tokenizer is None else None
        if raw is not None:
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_buffer(raw)
            except Exception as error:  # the library raises plain exceptions
                hint = "Install a newer version of the package tokenizers, or build the artifact again."
                raise ArtifactError(f"cannot be read: {error}", where=TOKENIZER, hint=hint) from error
        return self._tokenizer


def load(
    path: str | os.PathLike[str],
    *,
    executor: Choice = "auto",
    weights: str | None = None,
    memory: int | None = None,
    device: int = 0,
    max_requests: int | None = None,
    sparse: SparseChoice = "auto",
    retained_mass: bool = False,
    clock: StartupClock | None = None,
) -> Worker:
    """Open, check and load the artifact at `path` and make every graph ready.

    `executor` forces a path; `auto` takes graphs on a GPU that fits and the reference elsewhere. `weights` says where an
    artifact without weights takes them from: a checkpoint folder, a packed file, or `preset:NAME`. `memory` is all that
    the worker may hold on the device, in bytes; `max_requests` how many requests run at once, at most what was built.
    `retained_mass` keeps a histogram of what captures retain, at the cost of a small copy to the host a step.

    Raises ArtifactError for a damaged artifact, FitError for one that does not fit this machine, UsageError for values
    that cannot be, CheckpointError for weights that are not the artifact's, DeviceError if the device fails.
    """
    clock = clock or StartupClock()
    with ExitStack() as undo:
        with clock.phase("load"):
            opening = OpeningDriver(device, clock)
            undo.callback(opening.close)
            with clock.phase("open and verify"):
                artifact = open_artifact(Path(path), "all_but_weights")
            built = artifact.manifest.geometry.max_requests
            if max_requests is not None and not 1 <= max_requests <= built:
                raise UsageError(f"{max_requests} is outside 1 … {built}, what was built", where="--max-requests")
            with clock.phase("wait for device"):
                driver, machine = _opened(opening)
            chosen = choose_path(artifact.manifest, machine, executor, memory)
            opened = open_pools(artifact, chosen, weights, clock, driver)
            undo.callback(opened.close)
            sparsely = sparse == "auto" and len(artifact.manifest.geometry.sparse_modes) > 1
            worker = Worker(
                artifact, chosen, opened, clock, max_requests or built, sparse=sparsely, retained_mass=retained_mass
            )
        undo.pop_all()
        return worker


def _opened(opening: OpeningDriver) -> tuple[Driver | None, Machine]:
    try:
        driver = opening.result()
    except NoDeviceError as error:
        return None, Machine.absent(error.what)
    return driver, describe(driver)


def open_pools(artifact: Artifact, path: WorkerPath, weights: str | None, clock: StartupClock, driver: Driver | None) -> Pools:
    """The pools of `path` with its executors, on the device or on the host. Takes `driver` over."""
    if driver is not None and path.on_device:
        from ouro_build.runtime.device_pools import open_device_pools

        return open_device_pools(artifact, path, weights, clock, driver)
    if driver is not None:
        driver.close()  # its context would hold device memory that nothing here uses
    return open_host_pools(artifact, path, weights, clock)
