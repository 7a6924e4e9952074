"""A prompt to be measured: what it runs, what it amounts to, and the same in torch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.packing import weight_layout
from ouro_build.artifacts.plan import Pool, ProgramKey
from ouro_build.artifacts.presets import PRESETS
from ouro_build.runtime.bench_prefill import Prompt, check_prompt, make_prompt_line, prompt_flop, prompt_keys
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.reference import ReferenceExecutor
from ouro_build.runtime.snapshots import HostSnapshot, TorchSnapshot
from ouro_build.runtime.torch_baseline import TorchDecoder
from tests.reference_worker import GOLDEN, ReferenceWorker, reference_worker
from tests.unit.artifacts.blocks import logical

GEOMETRY = Geometry(buckets=(2, 8), prefill_buckets=(16, 128, 512), max_context=4096, max_requests=4, block_size=16)


def worker() -> ReferenceWorker:
    return reference_worker(
        str(GOLDEN / "gqa-fp32"), buckets=(1, 4), prefill_buckets=(8, 16), max_context=64, max_requests=4, kv_blocks=7
    )


def pools_of(made: ReferenceWorker) -> Pools:
    executors = made.steps._dispatcher._executors
    return Pools(made.preparation.targets[0].index, made.memory, made.kv_blocks, executors, {}, lambda: None)


@pytest.mark.parametrize("tokens", [1, 16, 45])
def test_the_prompt_is_right_and_that_of_torch_is_the_same(tokens: int) -> None:
    made = worker()
    model, geometry = made.steps.model, made.steps.geometry
    prompt = Prompt(model, geometry, pools_of(made), tokens)
    assert [len(part) for part in prompt.parts] == [16] * (tokens // 16) + [tokens % 16] * (tokens % 16 > 0)
    assert prompt.compare(TorchSnapshot(made.memory)).right
    assert prompt.compare(HostSnapshot(made.memory)).right
    logits = made.steps.collect(1, logits=True).logits
    assert logits is not None

    raw = made.memory.arena(Pool.WEIGHTS)
    weights = {
        t.name: torch.from_numpy(logical(t, raw[t.offset : t.offset + t.bytes].view(np.float32))) for t in weight_layout(model)
    }
    cache = torch.full((2, model.planes, 1, model.kv_heads, tokens, model.head_dim), torch.nan)
    decoder = TorchDecoder(model, weights, cache, torch.zeros(1, dtype=torch.int64))
    ids = torch.tensor([[row.token for part in prompt.parts for row in part]])
    with torch.inference_mode():
        assert torch.allclose(decoder.prefill(ids), torch.from_numpy(logits), atol=1e-4)

    table = made.steps.state("block_tables").astype(np.int32)[0, : -(-tokens // 16)]
    kv = made.memory.read(Pool.KV, 0, made.memory.size(Pool.KV)).view(np.float32)
    pages = kv.reshape(model.planes, 7, 2, model.kv_heads, 16, model.head_dim)[:, table]
    held = pages.transpose(2, 0, 3, 1, 4, 5).reshape(2, model.planes, 1, model.kv_heads, -1, model.head_dim)
    assert torch.allclose(cache, torch.from_numpy(held[..., :tokens, :].copy()), atol=1e-4)
    assert np.isnan(held[..., tokens:, :]).all()


class Unsteady(ReferenceExecutor):
    """Another bit in the last byte of the KV pool after the first `prefill` of all, and no other."""

    runs = 0

    def run(self, key: ProgramKey) -> None:
        super().run(key)
        if key.program == "prefill":
            self._arenas[Pool.KV][-1] ^= self.runs == 0
            self.runs += 1


def test_a_bit_of_the_keys_and_values_is_seen() -> None:
    made = worker()
    (executor,) = made.steps._dispatcher._executors
    assert isinstance(executor, ReferenceExecutor)
    executor.__class__ = Unsteady
    prompt = Prompt(made.steps.model, made.steps.geometry, pools_of(made), 20)
    assert not prompt.compare(HostSnapshot(made.memory)).right


def test_logits_that_are_not_finite_are_not_right() -> None:
    made = worker()
    made.memory.fill(Pool.WEIGHTS, 0xFF)
    prompt = Prompt(made.steps.model, made.steps.geometry, pools_of(made), 20)
    assert not prompt.compare(HostSnapshot(made.memory)).right


def test_programs_of_prompts() -> None:
    def buckets(*lengths: int) -> list[int]:
        *prefill, coda = prompt_keys(GEOMETRY, lengths)
        assert coda == ProgramKey("coda", 2)
        assert {key.program for key in prefill} == {"prefill"}
        return [key.bucket for key in prefill]

    assert buckets(4096) == [512]
    assert buckets(100) == [128]
    assert buckets(513, 1024) == [16, 512]
    assert buckets(20, 3, 600) == [16, 128, 512]


def test_arithmetic_of_a_line() -> None:
    tiny = PRESETS["tiny"].model
    h, f = tiny.hidden_size, tiny.intermediate_size
    layer = 3 * 2 * (4 * h * h + 3 * h * f) + 2 * 2 * h * (1 + 2 + 3)
    assert tiny.query_size == tiny.kv_size == h
    assert prompt_flop(tiny, 3) == tiny.loops * tiny.layers * layer + 2 * tiny.vocab_size * h
    line = make_prompt_line(tiny, GEOMETRY, 1030, 2.0)
    assert (line.tokens, line.bucket, line.chunks, line.ms) == (1030, 512, 3, 2.0)
    assert line.tokens_s == pytest.approx(515_000)
    assert line.tflop_s == pytest.approx(prompt_flop(tiny, 1030) / 2e-3 / 1e12)


def test_prompts_without_room_are_refused_with_what_to_build() -> None:
    check_prompt(GEOMETRY, 4096, 256)
    none = msgspec.structs.replace(GEOMETRY, prefill_buckets=())
    for geometry, tokens, blocks, hint in (
        (none, 1, 99, "--prefill-buckets"),
        (GEOMETRY, 4097, 999, "--max-context"),
        (GEOMETRY, 0, 9, "Give at least 1."),
        (GEOMETRY, 4096, 255, "shorter prompt"),
    ):
        with pytest.raises(UsageError) as caught:
            check_prompt(geometry, tokens, blocks)
        assert caught.value.where == "--prefill"
        assert caught.value.hint is not None
        assert hint in caught.value.hint
