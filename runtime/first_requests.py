"""The first step of every declared shape in a fresh worker, beside the hundredth: what first use costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

from ouro_build.artifacts.bench_records import FirstRequest
from ouro_build.runtime.batch import RowInput
from ouro_build.runtime.sample_text import SampleText
from ouro_build.runtime.step import Steps

TIMES = 100


def first_requests(steps: Steps) -> tuple[FirstRequest, ...]:
    """Run a step of every declared shape that there is room for `TIMES` times; nothing may have run before.

    All first steps come before any second one. Leaves slots and tables as the last step left them.
    """
    text = SampleText(steps.model.vocab_size)
    shapes: list[tuple[str, int, Callable[[], object]]] = []
    for bucket in steps.geometry.buckets:
        if bucket <= min(steps.geometry.max_requests, steps.kv_blocks):
            shapes.append(("decode", bucket, _decode(steps, text.prompt(0, bucket))))
    for bucket in steps.geometry.prefill_buckets:
        rows = _prompt_rows(steps, text.prompt(0, bucket))
        if rows:
            shapes.append(("prefill", bucket, partial(steps.prefill, rows, [rows[-1].slot])))
    firsts = [_ms(run) for _, _, run in shapes]
    return tuple(_line(*shape, first) for shape, first in zip(shapes, firsts, strict=True))


def _line(program: str, rows: int, run: Callable[[], object], first: float) -> FirstRequest:
    took = [first, *(_ms(run) for _ in range(TIMES - 1))]
    return FirstRequest(program=program, rows=rows, first_ms=first, hundredth_ms=took[-1], median_ms=median(took))


def _ms(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def _decode(steps: Steps, tokens: list[int]) -> Callable[[], object]:
    """A token for each of new requests that hold one token: every run puts them back at position 0."""
    rows = [RowInput(slot, token, 0, slot, slot) for slot, token in enumerate(tokens)]
    return partial(steps.decode, rows)


def _prompt_rows(steps: Steps, tokens: list[int]) -> list[RowInput]:
    """Rows of whole prompts that fill a bucket, as many as the context makes necessary; none if there is no room for them."""
    g = steps.geometry
    rows, blocks = [], iter(range(steps.kv_blocks))
    for at, token in enumerate(tokens):
        request, position = divmod(at, g.max_context)
        block = -1 if position % g.block_size else next(blocks, None)
        if block is None or request >= g.max_requests:
            return []
        rows.append(RowInput(g.decode_slots + at, token, position, request, block))
    return [*rows[:-1], rows[-1]._replace(slot=0)]
