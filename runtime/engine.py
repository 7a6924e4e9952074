"""A small scheduler: continuous batching of greedy requests at a fixed depth, prompts in chunks.

State advances on the device, so the next piece of work is submitted before the last one's tokens are read: the device never
waits for the host. A stop token is thus seen one step late; what that step made for its request is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import DeviceError, RequestError
from ouro_build.artifacts.rows import Mode
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.blocks import BlockPool
from ouro_build.runtime.references import Lease
from ouro_build.runtime.step import Sampled, Steps, Submitted
from ouro_build.runtime.traffic import Traffic

FinishReason = Literal["stop", "length"]
AHEAD = 1
"""Pieces of work that are submitted beyond the one whose tokens are waited for."""


@dataclass(eq=False)
class Request:
    """A greedy request. `feed[i]` replaces generated token i as the next input; `ids` and `logits` fill as it runs."""

    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    feed: Sequence[int] = ()
    keep_logits: bool = False
    ids: list[int] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    index: int = -1  # its block table and state slot while it runs
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens that were submitted
    lease: Lease | None = None  # of the reference slot that its sparse rows have
    sampled: int = 0  # tokens that were submitted, the last of them perhaps not yet in `ids`
    arrived: float = 0.0  # when it was queued, and when it had its last token, on the monotonic clock
    last_token: float = 0.0


@dataclass
class HostSeconds:
    """Seconds of the host's thread over `steps` pieces of work: submitting them, and waiting for their tokens."""

    steps: int = 0
    submit: float = 0.0
    wait: float = 0.0


class _Work(NamedTuple):
    """A prompt chunk or a decode step under way, and the requests that get a token from it."""

    requests: Sequence[Request]
    submitted: Submitted


class Engine:
    """Runs requests over `steps`: prompt chunks first, since they fill the batch, then decode steps, until all are done.

    At most `chunks` prompt chunks run between two decode steps, None: all that wait. `on_tokens` is told the requests that
    have just got a token. With `sparse` the rows that decode capture in the source loop and consume in those after it; prompts
    are always dense. `host` is where the host's time went; `traffic` is told of requests and tokens.
    """

    def __init__(
        self,
        steps: Steps,
        kv_blocks: int,
        max_requests: int,
        depth: int | None = None,
        on_tokens: Callable[[Sequence[Request]], None] = lambda requests: None,
        chunks: int | None = None,
        traffic: Traffic | None = None,
        *,
        sparse: bool = False,
    ) -> None:
        self._steps = steps
        self._geometry = steps.geometry
        self._blocks = BlockPool(kv_blocks)
        self._total_blocks = kv_blocks
        self._free = list(range(max_requests - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._prompts: list[Request] = []
        self._decoding: list[Request] = []
        self._under_way: deque[_Work] = deque()
        self._running: list[Request] = []
        self._depth = depth
        self._on_tokens = on_tokens
        self._chunks = chunks
        self._chunks_run = 0
        self.host = HostSeconds()
        self._traffic = traffic or Traffic()
        self._traffic.kv_blocks = kv_blocks
        self._mode = Mode.CAPTURE if sparse else Mode.DENSE
        self._references = steps.references if sparse else None

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and queues nothing, if it can never be served."""
        self._check(request)
        request.arrived = self._traffic.arrived()
        self._waiting.append(request)

    def step(self) -> bool:
        """Admit what fits and submit a piece of work; read the tokens of an earlier one. False when nothing is left to do.

        Raises RequestError if a step cannot be served, DeviceError if the device fails; no request goes on after either.
        """
        try:
            self._admit()
            began = time.perf_counter()
            work = self._next()
            if work is not None:
                self.host.steps += 1
                self.host.submit += time.perf_counter() - began
                self._under_way.append(work)
            while self._under_way and (work is None or len(self._under_way) > AHEAD):
                self._collect(self._under_way.popleft())
        except DeviceError as error:
            self._fail(error)
        except RequestError:
            self._drop()
            self._steps.collect(1)  # waits for all of it: only then are its reference slots free
            raise
        return bool(self._waiting or self._running or self._under_way)

    def run(self) -> None:
        """Step until every request has finished."""
        while self.step():
            pass

    def _check(self, request: Request) -> None:
        vocabulary, length = self._steps.model.vocab_size, len(request.prompt) + request.max_tokens
        if not request.prompt:
            raise RequestError("the prompt is empty")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}, at least 1 is needed")
        bad = next((i for i in (*request.prompt, *request.feed) if not 0 <= i < vocabulary), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocabulary}")
        if length > self._geometry.max_context:
            raise RequestError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} new ones exceed the artifact's context of "
                f"{self._geometry.max_context}",
                hint="Shorten the request, or build with a larger --max-context.",
            )
        if self._wanted(request) > self._total_blocks:
            raise RequestError(
                f"the request needs {self._wanted(request)} KV blocks, the worker has {self._total_blocks}",
                hint="Give the worker more --memory.",
            )

    def _wanted(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_tokens) // self._geometry.block_size)

    def _admit(self) -> None:
        """Blocks for a request's whole length are taken at once, so that a running request never lacks one."""
        while self._waiting and self._free and self._wanted(self._waiting[0]) <= self._blocks.free and self._slot():
            request = self._waiting.popleft()
            request.index = self._free.pop()
            request.blocks = self._blocks.take(self._wanted(request))
            self._traffic.admitted(len(request.blocks))
            self._prompts.append(request)
            self._running.append(request)

    def _slot(self) -> bool:
        """Bind a reference slot to the next request, if it needs one; False where it has to wait for another's.

        A slot is free once the last work on it has been waited for, which may be later than its request's last token.
        """
        if self._references is None:
            return True
        if not self._references.free and (self._running or self._under_way):
            return False
        (self._waiting[0].lease,) = self._references.bind(self._waiting[0])
        return True

    def _next(self) -> _Work | None:
        """Submit what comes next; None if all that could run is under way."""
        more = self._chunks is None or self._chunks_run < self._chunks
        if self._prompts and (more or not self._decoding):
            self._chunks_run += 1
            return self._prefill()
        if self._decoding:
            self._chunks_run = 0
            return self._decode()
        return None

    def _prefill(self) -> _Work:
        rows: list[RowInput] = []
        finished: list[Request] = []
        room = self._geometry.prefill_buckets[-1]
        for request in self._prompts:
            if len(rows) == room:
                break
            self._add_rows(request, rows, room)
            if request.computed == len(request.prompt):
                finished.append(request)
        keep = any(r.keep_logits for r in finished)
        submitted = self._steps.submit_prefill(rows, [r.index for r in finished], logits=keep)
        self._traffic.prompt_tokens += len(rows)
        self._prompts = self._prompts[len(finished) :]
        self._decoding += finished
        return self._work(finished, submitted)

    def _add_rows(self, request: Request, rows: list[RowInput], room: int) -> None:
        """The next rows of a prompt, as many as there is room for. The last of a prompt runs in the request's own slot."""
        g, prompt, blocks = self._geometry, request.prompt, request.blocks
        first, size, index = request.computed, g.block_size, request.index
        last = min(len(prompt), first + room - len(rows))
        slot = g.decode_slots + len(rows) - first
        for at in range(first, last):
            rows.append(RowInput(slot + at, prompt[at], at, index, -1 if at % size else blocks[at // size]))
        if last == len(prompt):  # where decoding goes on without the host
            rows[-1] = rows[-1]._replace(slot=index)
        request.computed = last

    def _decode(self) -> _Work:
        requests = list(self._decoding)
        rows = [self._decode_row(request) for request in requests]
        keep = any(r.keep_logits for r in requests)
        return self._work(requests, self._steps.submit_decode(rows, depth=self._depth, logits=keep))

    def _decode_row(self, request: Request) -> RowInput:
        made = request.sampled
        token = request.feed[made - 1] if made <= len(request.feed) else -1
        index, within = divmod(len(request.prompt) + made - 1, self._geometry.block_size)
        row = RowInput(request.index, token, block=-1 if within else request.blocks[index])
        if made > 1:
            return row
        # Its first row: the slot may have been another's, in another mode.
        row = row._replace(mode=self._mode)
        lease = request.lease
        return row if lease is None else row._replace(reference_slot=lease.slot, generation=lease.generation)

    def _work(self, requests: list[Request], submitted: Submitted) -> _Work:
        """Count a token for each of `requests`; those that get no more leave the batch."""
        for request in requests:
            request.sampled += 1
        self._decoding = [r for r in self._decoding if r.sampled < r.max_tokens]
        return _Work(requests, submitted)

    def _collect(self, work: _Work) -> None:
        """Wait for the tokens of `work`, append them, and retire the requests that end with them."""
        began = time.perf_counter()
        sampled = work.submitted.result()
        self.host.wait += time.perf_counter() - began
        # A request that a stop token ended may have had a step under way.
        live = [(at, request) for at, request in enumerate(work.requests) if request.finish_reason is None]
        now = time.monotonic()
        for at, request in live:
            self._take(request, at, sampled)
            self._traffic.token(now, request.arrived, request.last_token)
            request.last_token = now
        if live:
            self._on_tokens([request for _, request in live])
        for _, request in live:
            if request.finish_reason is not None:
                self._traffic.done(request.finish_reason, now - request.arrived, len(request.blocks))
                self._running.remove(request)
                if request.sampled < request.max_tokens:
                    self._decoding.remove(request)
                self._release(request)

    def _take(self, request: Request, at: int, sampled: Sampled) -> None:
        token = int(sampled.tokens[at])
        request.ids.append(token)
        if request.keep_logits and sampled.logits is not None:
            request.logits.append(sampled.logits[at])
        if token in request.stop_ids:
            request.finish_reason = "stop"
        elif len(request.ids) == request.max_tokens:
            request.finish_reason = "length"

    def _release(self, request: Request) -> None:
        """Later work may use its slot and its blocks at once: a step of it that is under way runs before."""
        self._blocks.give(request.blocks)
        self._free.append(request.index)
        request.blocks, request.index = [], -1
        if self._references is not None and request.lease is not None:
            lease, request.lease = request.lease, None
            self._references.retire([lease])

    def _drop(self) -> None:
        """Forget every request; what those that run hold is free again."""
        running, self._running = self._running, []
        self._prompts, self._decoding = [], []
        self._waiting.clear()
        self._under_way.clear()
        self._traffic.lost()
        for request in running:
            self._release(request)

    def _fail(self, error: DeviceError) -> None:
        """The device's memory can't be trusted any more: no request goes on, none gets a token that may be wrong."""
        lost = len(self._running) + len(self._waiting)
        with suppress(DeviceError):  # nothing can be cleared on a device that has failed
            self._drop()
        raise DeviceError(f"{error.what}; {lost} requests were lost", where=error.where, hint="Restart the worker.") from error
