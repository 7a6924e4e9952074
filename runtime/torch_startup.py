"""A worker as torch makes one, started: the yardstick of `ouro-worker bench startup`. Imports torch.

`python -m ouro_build.runtime.torch_startup ARTIFACT DEVICE OUT [WEIGHTS]` loads the artifact's weights, captures a CUDA graph
of a decode step for every decode bucket, replays the smallest, and writes a start-up record to OUT. No prompt is run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ouro_build.artifacts.reader import Artifact, open_artifact
from ouro_build.artifacts.records import encode_record
from ouro_build.runtime.startup import StartupClock

if TYPE_CHECKING:
    from torch import Tensor

    from ouro_build.artifacts.packing import PackedTensor

_CONTEXT = 32
"""Tokens that the cache has room for: graphs of longer ones hold the same kernels."""


def start(artifact: Artifact, device: int, weights: str | None, clock: StartupClock) -> None:
    """Load, capture and replay on CUDA device `device`, timed by `clock`."""
    with clock.phase("import torch"):
        import torch

        from ouro_build.runtime.torch_baseline import TorchDecoder, captured
    model, buckets = artifact.manifest.model, artifact.manifest.geometry.buckets
    where = f"cuda:{device}"
    with clock.phase("device"):
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    with clock.phase("weights") as phase:
        tensors = _weights(artifact, weights, where)
        torch.cuda.synchronize()
        phase.bytes = artifact.manifest.weights.bytes
    replays: list[Callable[[], object]] = []
    with clock.phase("graphs"), torch.inference_mode():
        shape = (2, model.planes, buckets[-1], model.kv_heads, _CONTEXT, model.head_dim)
        cache = torch.zeros(shape, dtype=getattr(torch, model.dtype), device=where)
        tokens = torch.zeros(buckets[-1], dtype=torch.int64, device=where)
        for rows in reversed(buckets):
            decoder = TorchDecoder(model, tensors, cache[:, :, :rows], tokens[:rows])
            decoder.step()  # libraries choose their kernels outside the capture
            replays.append(captured(decoder.step))
    began = time.monotonic()
    replays[-1]()
    tokens[:1].cpu()
    clock.restored(len(replays), 0)
    clock.first_token(began)


def _weights(artifact: Artifact, weights: str | None, where: str) -> dict[str, Tensor]:
    import torch

    from ouro_build.artifacts.packing import weight_layout
    from ouro_build.runtime.loading import Loading
    from ouro_build.runtime.weights import embedded_weights, weight_pieces

    manifest = artifact.manifest
    pool = torch.empty(manifest.weights.bytes, dtype=torch.uint8, device=where)
    if weights is None and manifest.weights.embedded:
        pool.copy_(torch.from_numpy(embedded_weights(artifact).data))
    else:
        for offset, data in weight_pieces(artifact, weights, Loading().check_weights):
            pool[offset : offset + data.nbytes].copy_(torch.from_numpy(data))
    return {t.name: _unpacked(pool[t.offset : t.offset + t.bytes], t) for t in weight_layout(manifest.model)}


def _unpacked(raw: Tensor, tensor: PackedTensor) -> Tensor:
    """A packed tensor as torch's layers want it: a matrix [N, K] in rows, a copy of its own."""
    import torch

    stored = raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)
    if tensor.matrix is None:
        return stored
    rows, columns = tensor.matrix
    return stored.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()


def main(arguments: list[str]) -> None:
    """Start, and write the record."""
    clock = StartupClock()
    path, device, out, *weights = arguments
    with clock.phase("open"):
        artifact = open_artifact(Path(path), "all_but_weights")
    start(artifact, int(device), weights[0] if weights else None, clock)
    Path(out).write_bytes(encode_record(clock.record()))


if __name__ == "__main__":
    main(sys.argv[1:])
