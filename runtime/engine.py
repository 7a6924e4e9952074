"""A small scheduler: continuous batching of greedy requests at a fixed depth, prompts in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.errors import DeviceError, RequestError
from ouro_build.artifacts.rows import Mode
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.blocks import BlockPool
from ouro_build.runtime.references import Lease
from ouro_build.runtime.step import Sampled, Steps

FinishReason = Literal["stop", "length"]


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
    computed: int = 0  # prompt tokens that are in the KV pool
    lease: Lease | None = None  # of the reference slot that its sparse rows have


class Engine:
    """Runs requests over `steps`: a prompt chunk, then a decode step, again and again, until all are done.

    With `sparse` the rows that decode capture in the source loop and consume in those after it; prompts are always dense.
    """

    def __init__(
        self,
        steps: Steps,
        kv_blocks: int,
        max_requests: int,
        depth: int | None = None,
        on_token: Callable[[], None] = lambda: None,
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
        self._depth = depth
        self._on_token = on_token
        self._mode = Mode.CAPTURE if sparse else Mode.DENSE
        self._references = steps.references if sparse else None

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError, and queues nothing, if it can never be served."""
        self._check(request)
        self._waiting.append(request)

    def step(self) -> bool:
        """Admit what fits, run one prompt chunk and one decode step. False when nothing is left to do.

        Raises RequestError if a step cannot be served, DeviceError if the device fails; no request goes on after either.
        """
        self._admit()
        try:
            if self._prompts:
                self._prefill()
            if self._decoding:
                self._decode()
        except DeviceError as error:
            self._fail(error)
        except RequestError:
            self._drop()
            raise
        return bool(self._waiting or self._prompts or self._decoding)

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
            self._prompts.append(request)

    def _slot(self) -> bool:
        """Bind a reference slot to the next request, if it needs one; False where it has to wait for another's."""
        if self._references is None:
            return True
        if not self._references.free and (self._prompts or self._decoding):
            return False
        (self._waiting[0].lease,) = self._references.bind(self._waiting[0])
        return True

    def _prefill(self) -> None:
        rows: list[RowInput] = []
        finished: list[Request] = []
        room = self._geometry.prefill_buckets[-1]
        for request in self._prompts:
            chunk = request.prompt[request.computed : request.computed + room - len(rows)]
            if not chunk:
                break
            for token in chunk:
                rows.append(self._prompt_row(request, token, len(rows)))
                request.computed += 1
            if request.computed == len(request.prompt):
                finished.append(request)
        keep = any(r.keep_logits for r in finished)
        sampled = self._steps.prefill(rows, [r.index for r in finished], logits=keep)
        self._prompts = self._prompts[len(finished) :]
        self._decoding += finished
        self._take(finished, sampled)

    def _prompt_row(self, request: Request, token: int, at: int) -> RowInput:
        # The last row of a prompt runs in the request's own slot, where decoding goes on without the host.
        position = request.computed
        last = position == len(request.prompt) - 1
        slot = request.index if last else self._geometry.decode_slots + at
        return RowInput(slot, token, position, request.index, self._block(request, position))

    def _decode(self) -> None:
        # A prompt that ended in this very step may have ended its request with it.
        requests = list(self._decoding)
        rows = [self._decode_row(request) for request in requests]
        keep = any(r.keep_logits for r in requests)
        self._take(requests, self._steps.decode(rows, depth=self._depth, logits=keep))

    def _decode_row(self, request: Request) -> RowInput:
        made = len(request.ids)
        token = request.feed[made - 1] if made <= len(request.feed) else -1
        position = len(request.prompt) + made - 1
        row = RowInput(request.index, token, block=self._block(request, position))
        if made > 1:
            return row
        # Its first row: the slot may have been another's, in another mode.
        row = row._replace(mode=self._mode)
        lease = request.lease
        return row if lease is None else row._replace(reference_slot=lease.slot, generation=lease.generation)

    def _block(self, request: Request, position: int) -> int:
        index, within = divmod(position, self._geometry.block_size)
        return request.blocks[index] if within == 0 else -1

    def _take(self, requests: Sequence[Request], sampled: Sampled) -> None:
        """Append each request's token, and retire the requests that it ends."""
        for at, request in enumerate(requests):
            token = int(sampled.tokens[at])
            request.ids.append(token)
            if request.keep_logits and sampled.logits is not None:
                request.logits.append(sampled.logits[at])
            if token in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.ids) == request.max_tokens:
                request.finish_reason = "length"
        if requests:
            self._on_token()
        for request in [r for r in requests if r.finish_reason]:
            self._decoding.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        self._blocks.give(request.blocks)
        self._free.append(request.index)
        request.blocks, request.index = [], -1
        if self._references is not None and request.lease is not None:
            lease, request.lease = request.lease, None
            self._references.retire([lease])

    def _drop(self) -> None:
        """Forget every request; what those that run hold is free again."""
        running = [*self._prompts, *self._decoding]
        self._prompts, self._decoding, self._waiting = [], [], deque()
        for request in running:
            self._release(request)

    def _fail(self, error: DeviceError) -> None:
        """The device's memory can't be trusted any more: no request goes on, none gets a token that may be wrong."""
        lost = len(self._prompts) + len(self._decoding) + len(self._waiting)
        with suppress(DeviceError):  # nothing can be cleared on a device that has failed
            self._drop()
        raise DeviceError(f"{error.what}; {lost} requests were lost", where=error.where, hint="Restart the worker.") from error
