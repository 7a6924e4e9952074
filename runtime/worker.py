"""A worker: an artifact in memory, ready to decode."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import RequestError, UsageError
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import Artifact, open_artifact
from ouro_build.artifacts.records import CoverageRecord, Reason, StartupRecord
from ouro_build.runtime.coverage import CoverageCounter, declared_graphs
from ouro_build.runtime.dispatch import Dispatcher
from ouro_build.runtime.engine import Engine, FinishReason, Request
from ouro_build.runtime.executor import ExecutorName
from ouro_build.runtime.loading import Loading, Verification
from ouro_build.runtime.memory import Memory
from ouro_build.runtime.opening import OpeningDriver
from ouro_build.runtime.paths import Choice, WorkerPath
from ouro_build.runtime.placing import choose, given_memory, open_pools, wait_for
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.retained_mass import check_retained_mass
from ouro_build.runtime.start import Start
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.step import Steps
from ouro_build.runtime.tokenizer import load_tokenizer
from ouro_build.runtime.traffic import Traffic
from ouro_build.runtime.weights import begin_upload

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Prompt = str | Sequence[int]
SparseChoice = Literal["auto", "off"]
"""`auto` decodes sparsely where the artifact has sparse modes; `off` runs it dense."""
LOAD = "load"
"""The phase of start-up in which a worker is loaded."""


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
    `sparse` says whether `generate` and `engine` decode sparsely. `traffic` counts their requests and tokens.
    One thread may use a worker, the one that loaded it: CUDA's context is current there.
    """

    def __init__(
        self,
        artifact: Artifact,
        path: WorkerPath,
        pools: Pools,
        clock: StartupClock,
        max_requests: int,
        tokenizer: Tokenizer | None,
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
        self._coverage = CoverageCounter(declared_graphs(pools.index))
        self.traffic = Traffic()
        self._tokenizer = tokenizer
        self._closed = False
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
        return (*self.path.notes, *self._pools.every_note)

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
        if isinstance(prompts, str | bytes):
            raise RequestError("one text is given where a list of prompts is expected", hint="Give [text].")
        loops = self.steps.loops(depth)
        if len(feed) > len(prompts):
            raise RequestError(f"{len(feed)} lists of tokens to feed, {len(prompts)} prompts")
        engine = self.engine(depth, lambda _: self._clock.first_token(began), sparse=sparse)
        stop = frozenset() if ignore_eos else frozenset(self.artifact.manifest.stop_ids)
        requests = [
            Request(self.encode(p), max_tokens, stop, feed[i] if i < len(feed) else (), logits) for i, p in enumerate(prompts)
        ]
        for at, request in enumerate(requests):
            try:
                engine.submit(request)
            except RequestError as error:
                self.traffic.lost()
                raise RequestError(error.what, where=f"prompt {at}", hint=error.hint) from error
        engine.run()
        return [self._output(r, loops) for r in requests]

    def engine(
        self,
        depth: int | None = None,
        on_tokens: Callable[[Sequence[Request]], None] = lambda requests: None,
        *,
        sparse: bool | None = None,
    ) -> Engine:
        """A scheduler over all of the worker's slots and KV blocks: one at a time. See `Engine`. It settles the worker.

        `sparse` overrides the worker's.
        """

        if self._closed:
            raise RequestError("the worker is closed", hint="Load the artifact again.")

        def told(requests: Sequence[Request]) -> None:
            on_tokens(requests)
            self._pools.settle()

        loops = self.steps.loops(depth)
        sparsely = self.sparse if sparse is None else sparse
        return Engine(self.steps, self._pools.kv_blocks, self.max_requests, loops, told, traffic=self.traffic, sparse=sparsely)

    def settle(self) -> None:
        """Begin to give back what only loading needed, the locked pages of the weights' file; once, and on another thread.

        `generate` and `engine` do it after their first token. Who schedules rows with `steps` calls it when there is time.
        """
        self._pools.settle()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises RequestError for text that is none, or if the artifact carries no tokenizer."""
        if not isinstance(prompt, str):
            return _ids(prompt)
        if self._tokenizer is None:
            raise RequestError("the artifact carries no tokenizer", hint="Give token ids: --prompt-ids FILE.json")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not Unicode text: {error.reason} at character {error.start}") from error
        return list(self._tokenizer.encode(prompt).ids)

    def coverage(self, *, masses: bool = True) -> CoverageRecord:
        """What ran by graphs and what did not, so far; its `share` is that of decoded rows served by whole graphs.

        With the retained mass of every capture, where the worker was loaded to keep it; that waits for the last of them.
        Without `masses` it leaves them out, waits for nothing, and may be asked for by any thread.
        """
        mass = self.steps.retained_mass if masses else None
        return self._coverage.record(None if mass is None else mass.record())

    def clear_coverage(self) -> None:
        """Count from nothing again."""
        self._coverage.clear()
        if self.steps.retained_mass is not None:
            self.steps.retained_mass.clear()

    def startup(self) -> StartupRecord:
        """Start-up up to the first token."""
        return self._clock.record()

    def close(self) -> None:
        """Give back graphs, images and memory."""
        self._closed = True
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
        return None if self._tokenizer is None else str(self._tokenizer.decode(ids))


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        if not any(isinstance(token, bool) for token in prompt):
            return [index(token) for token in prompt]
    except TypeError:
        pass
    raise RequestError("a prompt is text, or a list of token ids, which are whole numbers")


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
    verify: Verification = "full",
    coverage: CoverageRecord | None = None,
    pools: Mapping[Pool | str, object] | None = None,
    start: Start | None = None,
) -> Worker:
    """Open, check and load the artifact at `path` and make every graph ready.

    `executor` forces a path; `auto` takes graphs on a GPU that fits and the reference elsewhere. `weights` says where an
    artifact without weights takes them from: a checkpoint folder, a packed file, or `preset:NAME`. `memory` is all that
    the worker may hold on the device, in bytes; `max_requests` how many requests run at once, at most what was built.
    `retained_mass` keeps a histogram of what captures retain, at the cost of a small copy to the host a step.
    `verify`: `full` checks every byte, `fast` leaves the weights unchecked. `coverage` is a record of such work as is to come:
    graphs that it saw most are restored first. `pools` are device memory that the process owns already, a pool each by name:
    (address, bytes), a DLPack capsule or an object with `__dlpack__`; `given_memory` says who owns it when. `start` is
    what has begun already; it is taken over.

    Raises ArtifactError for a damaged artifact, FitError for one that does not fit this machine, UsageError for values
    that cannot be, CheckpointError for weights that are not the artifact's, DeviceError if the device fails.
    """
    start = start or Start(StartupClock())
    clock, opening = start.clock, start.opening
    with ExitStack() as undo:
        undo.callback(start.close)
        given = given_memory(pools)
        if given is not None:
            undo.callback(given.release)
        loading = Loading(weights=weights, verify=verify, coverage=coverage, given=given)
        with clock.phase(LOAD):
            if opening is not None and opening.device != device:
                opening.close()
                opening = None
            if opening is None:
                opening = OpeningDriver(device, clock)
                undo.callback(opening.close)
            with clock.phase("open and verify"):
                artifact = open_artifact(Path(path), "all_but_weights")
            with clock.phase("begin weights"):
                upload = begin_upload(artifact, loading, clock, LOAD, start.hashes)
                if upload is not None:
                    undo.callback(upload.close)
            with clock.phase("tokenizer"):  # while CUDA starts
                tokenizer = load_tokenizer(artifact)
            with clock.phase("modules"):  # likewise
                import ouro_build.runtime.device_pools  # noqa: F401
            if retained_mass:
                check_retained_mass(artifact.manifest.geometry, str(artifact.path))
            built = artifact.manifest.geometry.max_requests
            if max_requests is not None and not 1 <= max_requests <= built:
                raise UsageError(f"{max_requests} is outside 1 … {built}, what was built", where="--max-requests")
            with clock.phase("wait for device"):
                driver, machine = wait_for(opening)
                chosen = choose(artifact.manifest, machine, executor, memory, given)
            opened = open_pools(artifact, chosen, loading, clock, driver, upload)
            undo.callback(opened.close)
            sparsely = sparse == "auto" and len(artifact.manifest.geometry.sparse_modes) > 1
            with clock.phase("ready"):
                requests = max_requests or built
                worker = Worker(
                    artifact, chosen, opened, clock, requests, tokenizer, sparse=sparsely, retained_mass=retained_mass
                )
        undo.pop_all()
        return worker
