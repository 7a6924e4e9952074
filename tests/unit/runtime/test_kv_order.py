"""One set of plans over KV pools of both orders: the strides differ, the results do not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ouro_build.artifacts.errors import FitError
from ouro_build.artifacts.manifest import KV_AXES, KV_ORDERS, KvLayout
from ouro_build.artifacts.plan import LoadTimeValue, Pool
from ouro_build.builder.buffers import kv_layout
from ouro_build.runtime.engine import Request
from ouro_build.runtime.load_time import load_time_values
from tests.reference_worker import GOLDEN, reference_worker


@pytest.mark.parametrize(("axes", "strides"), [(KV_ORDERS[0], (5, 1)), (KV_ORDERS[1], (1, 8))])
def test_strides_follow_the_order(axes: tuple[str, ...], strides: tuple[int, int]) -> None:
    """Of 8 planes and 5 blocks, in blocks."""
    preparation = reference_worker("preset:tiny", max_context=32, max_requests=1).preparation
    model = preparation.source.model
    assert model.planes == 8
    kv = kv_layout(model, preparation.geometry, axes)
    values = load_time_values(kv, 5, 132)
    found = values[LoadTimeValue.KV_PLANE_STRIDE], values[LoadTimeValue.KV_BLOCK_STRIDE]
    assert found == tuple(stride * kv.block_elements for stride in strides)
    assert kv.block_elements * np.dtype(np.float32).itemsize * model.planes == preparation.geometry.block_bytes(model)


def test_blocks_too_far_apart_for_kernels_are_refused() -> None:
    """2,048 planes of 64 heads, blocks of 128 tokens: beyond 32 bits only where planes lie inside of blocks."""
    planes = tuple(tuple(range(512 * loop, 512 * loop + 512)) for loop in range(4))
    outer, inner = (
        KvLayout(axes=axes, planes=planes, block_size=128, kv_heads=64, head_dim=128, dtype="bfloat16") for axes in KV_ORDERS
    )
    assert load_time_values(outer, 5, 132)[LoadTimeValue.KV_BLOCK_STRIDE] == outer.block_elements < 2**32
    with pytest.raises(FitError, match=f"{2**32} elements apart"):
        load_time_values(inner, 5, 132)


def test_the_engine_continues_prompts_the_same_in_both_orders() -> None:
    prompts = json.loads((GOLDEN / "gqa-fp32" / "golden.json").read_text())["prompts"]
    pools = []
    for axes in KV_ORDERS:
        worker = reference_worker(str(GOLDEN / "gqa-fp32"), kv_axes=axes)
        engine = worker.engine()
        requests = {i: Request(p["ids"], 24) for i, p in prompts.items()}
        for request in requests.values():
            engine.submit(request)
        engine.run()
        assert {i: r.ids for i, r in requests.items()} == {i: p["greedy"] for i, p in prompts.items()}
        planes, blocks = worker.steps.model.planes, worker.kv_blocks
        pool = worker.memory.read(Pool.KV, 0, worker.memory.size(Pool.KV))
        pools.append(pool.reshape(planes, blocks, -1) if axes == KV_AXES else pool.reshape(blocks, planes, -1).swapaxes(0, 1))
    assert np.array_equal(pools[0], pools[1])
