"""The scheduler, against the plain model: batching, chunks, splits and depth change nothing about a request's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ouro_build.artifacts.errors import DeviceError, RequestError
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.records import Reason
from ouro_build.runtime.blocks import BlockPool
from ouro_build.runtime.engine import Engine, Request
from ouro_build.runtime.step import Sampled, Submitted
from tests.dense_model import DenseModel
from tests.reference_worker import GOLDEN, ReferenceWorker, reference_worker

CASE = "gqa-fp32"
PROMPTS = [p["ids"] for p in json.loads((GOLDEN / CASE / "golden.json").read_text())["prompts"].values()]


@cache
def worker() -> ReferenceWorker:
    return reference_worker(str(GOLDEN / CASE), buckets=(1, 2, 4), prefill_buckets=(8, 16), max_context=64, max_requests=6)


@cache
def dense() -> DenseModel:
    return DenseModel(worker().steps.model, load_file(GOLDEN / CASE / "model.safetensors"))


@cache
def greedy(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(dense().greedy(prompt, count))


def run(requests: list[Request], **options: Any) -> None:
    engine = worker().engine(**options)
    for request in requests:
        engine.submit(request)
    engine.run()


Cache = list[list[list[tuple[torch.Tensor, torch.Tensor]]]]
tokens = st.integers(0, 383)
prompts = st.lists(tokens, min_size=1, max_size=40)


@settings(max_examples=15)
@given(st.lists(st.tuples(prompts, st.integers(1, 6)), min_size=1, max_size=9), st.integers(1, 6))
def test_any_mix_of_requests_gives_each_its_own_tokens(mix: list[tuple[list[int], int]], at_once: int) -> None:
    requests = [Request(prompt, count) for prompt, count in mix]
    run(requests, max_requests=at_once)
    for request in requests:
        assert tuple(request.ids) == greedy(tuple(request.prompt), request.max_tokens)
        assert request.finish_reason == "length"
        assert request.blocks == []


def test_more_rows_than_the_largest_bucket_are_split_and_counted() -> None:
    worker().coverage.clear()
    requests = [Request(PROMPTS[1][i : i + 2], 3) for i in range(6)]
    run(requests)
    for request in requests:
        assert tuple(request.ids) == greedy(tuple(request.prompt), 3)
    splits = [f for f in worker().coverage.record().fallbacks if f.reason is Reason.BUCKET_MISS and f.program == "recurrent"]
    assert [(f.rows, f.path, f.count) for f in splits] == [(6, "split", 3 * 2)]


def test_every_run_by_the_reference_is_counted() -> None:
    worker().coverage.clear()
    run([Request(PROMPTS[0], 2)])
    record = worker().coverage.record()
    assert record.keys == ()
    assert {f.reason for f in record.fallbacks} == {Reason.NO_DEVICE}
    counts = {f.program: (f.rows, f.count, f.path) for f in record.fallbacks if f.rows == 1}
    assert counts["recurrent"] == (1, 3, "reference")
    assert record.share == 0.0


def test_a_stop_id_ends_a_request_and_is_its_last_token() -> None:
    want = greedy(tuple(PROMPTS[0]), 8)
    stop = want[2]
    request = Request(PROMPTS[0], 8, frozenset([stop]))
    run([request])
    assert (tuple(request.ids), request.finish_reason) == (want[: want.index(stop) + 1], "stop")


def test_fed_tokens_replace_the_sampled_ones_as_inputs() -> None:
    feed = [5, 9, 300]
    request = Request(PROMPTS[0], 4, feed=feed)
    run([request])
    ids = list(PROMPTS[0])
    for step in range(4):
        assert request.ids[step] == int(dense().forward(ids).logits[-1, -1].argmax())
        ids += feed[step : step + 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallower_depth_reads_the_last_version_of_keys_and_values(depth: int) -> None:
    """A token that stopped at depth e serves later loops with its keys and values of loop e - 1."""
    request = Request(PROMPTS[0], 5)
    run([request], depth=depth)
    assert request.ids == shallow_greedy(PROMPTS[0], 5, depth)
    full = Request(PROMPTS[0], 5)
    run([full])
    assert full.ids != request.ids, "the case tells nothing: depth does not matter to it"


def shallow_greedy(prompt: list[int], count: int, depth: int) -> list[int]:
    """Tokens at `depth`, one at a time, over keys and values kept in lists: [loop][layer] → (keys, values)."""
    config, model = worker().steps.model, dense()
    cache_: Cache = [[[] for _ in range(config.layers)] for _ in range(config.loops)]
    made: list[int] = []
    for at, token in enumerate(prompt):
        logits = token_logits(model, cache_, token, at, config.loops)
    while True:
        made.append(int(logits.argmax()))
        if len(made) == count:
            return made
        logits = token_logits(model, cache_, made[-1], len(prompt) + len(made) - 1, depth)


def token_logits(model: DenseModel, cache_: Cache, token: int, at: int, depth: int) -> torch.Tensor:
    config = worker().steps.model
    h = model.embed(token)
    for loop in range(depth):
        for layer in range(config.layers):
            h = model.step(h, at, layer, cache_[loop][layer])
        h = model.finish(h)
    for loop in range(depth, config.loops):
        for layer in range(config.layers):
            cache_[loop][layer].append(cache_[depth - 1][layer][-1])
    return model.head(h)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 1), "prompt is empty"),
        (Request([1], 0), "max_tokens is 0"),
        (Request([384], 1), "outside the vocabulary of 384"),
        (Request([1], 1, feed=[-1]), "outside the vocabulary"),
        (Request([1] * 60, 5), "exceed the artifact's context of 64"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        worker().engine().submit(request_)


def test_a_device_error_loses_every_request_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = worker().engine()
    requests = [Request(PROMPTS[0], 4) for _ in range(3)]
    for request in requests:
        engine.submit(request)

    def fail(rows: object, **_: object) -> None:
        raise DeviceError("an illegal address was met", where=str(ProgramKey("recurrent", 4)))

    monkeypatch.setattr(worker().steps, "submit_decode", fail)
    with pytest.raises(DeviceError, match="illegal address was met; 3 requests were lost"):
        engine.run()
    assert all(r.finish_reason is None for r in requests)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_blocks_are_never_handed_out_twice(wanted: list[int]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for count in wanted:
        if count > pool.free:
            with pytest.raises(RequestError, match=f"{count} KV blocks wanted, {pool.free} free"):
                pool.take(count)
            if held:
                pool.give(held.pop())
        else:
            held.append(pool.take(count))
        taken = [b for blocks in held for b in blocks]
        assert len(set(taken)) == len(taken) == 8 - pool.free


def test_a_step_is_submitted_before_the_last_ones_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seen = worker().steps, list[tuple[str, int]]()

    def watched(submitted: Submitted, number: int) -> Submitted:
        result = submitted.result

        def noted() -> Sampled:
            seen.append(("read", number))
            return result()

        monkeypatch.setattr(submitted, "result", noted)
        return submitted

    def watch(name: str) -> None:
        submit = getattr(steps, name)

        def noted(*args: object, **options: object) -> Submitted:
            number = sum(kind == "submit" for kind, _ in seen)
            seen.append(("submit", number))
            return watched(submit(*args, **options), number)

        monkeypatch.setattr(steps, name, noted)

    watch("submit_prefill")
    watch("submit_decode")
    run([Request([1, 2, 3], 4)])
    assert seen == [
        ("submit", 0), ("submit", 1), ("read", 0), ("submit", 2), ("read", 1), ("submit", 3), ("read", 2), ("read", 3),
    ]  # fmt: skip


@settings(max_examples=10)
@given(st.lists(st.tuples(prompts, st.integers(0, 4)), min_size=2, max_size=7), st.integers(1, 3))
def test_a_request_takes_over_from_one_that_a_stop_token_ended(mix: list[tuple[list[int], int]], at_once: int) -> None:
    """Its slot and blocks are in use by a step that is under way, whose token is dropped."""
    requests, wanted = [], []
    for prompt, at in mix:
        made = greedy(tuple(prompt), 6)
        stop = made[at]
        requests.append(Request(prompt, 6, frozenset([stop])))
        wanted.append(list(made[: made.index(stop) + 1]))
    run(requests, max_requests=at_once)
    assert [r.ids for r in requests] == wanted
    assert all(r.finish_reason == "stop" and r.blocks == [] for r in requests)


def test_prompt_chunks_between_two_decode_steps_can_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(chunks: int | None) -> str:
        seen, steps = "", worker().steps
        engine = Engine(steps, worker().kv_blocks, 3, chunks=chunks)
        for request in [Request([1] * 16, 3) for _ in range(3)]:
            engine.submit(request)
        prefill, decode = engine._prefill, engine._decode

        def noted(kind: str, work: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                nonlocal seen
                seen += kind
                return work()

            return call

        monkeypatch.setattr(engine, "_prefill", noted("p", prefill))
        monkeypatch.setattr(engine, "_decode", noted("d", decode))
        engine.run()
        assert engine.host.steps == len(seen)
        return seen

    assert kinds(None) == "pppdd"
    assert kinds(1) == "pdpdpdd"
