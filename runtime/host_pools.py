"""Pools in ordinary memory, with the reference executor over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.digests import verify_files
from ouro_build.artifacts.plan import Pool
from ouro_build.artifacts.reader import Artifact
from ouro_build.runtime.load_time import check_divisors, load_time_values
from ouro_build.runtime.loading import Loading
from ouro_build.runtime.memory import HostMemory
from ouro_build.runtime.paths import WorkerPath
from ouro_build.runtime.pools import Pools, pool_sizes
from ouro_build.runtime.reference import ReferenceExecutor, UnbuiltModes
from ouro_build.runtime.references import fill_references
from ouro_build.runtime.startup import StartupClock
from ouro_build.runtime.weights import embedded_weights, weight_pieces


def open_host_pools(artifact: Artifact, path: WorkerPath, loading: Loading, clock: StartupClock) -> Pools:
    """Lay out the pools of `path` on the host and fill the weights."""
    manifest, target = artifact.manifest, path.target
    with clock.phase("plans"):
        index, columns = artifact.plans(target)
    values = load_time_values(manifest.kv, path.kv_blocks, target.part.sm_count)
    check_divisors(values, index.load_time)
    sizes = pool_sizes(target.memory, path.kv_blocks)
    with clock.phase("weights") as phase:
        memory = HostMemory(sizes, _mapped(artifact, loading.check_weights) if loading.weights is None else None)
        if loading.weights is not None or not manifest.weights.embedded:
            for offset, data in weight_pieces(artifact, loading.weights, loading.check_weights):
                memory.write(Pool.WEIGHTS, offset, data)
        phase.bytes = manifest.weights.bytes
    if manifest.geometry.references:
        fill_references(memory, {b.name: b for b in index.buffers}, artifact.retained_counts())
    with clock.phase("executors"):
        executor = ReferenceExecutor(index, columns, memory, values)
        unbuilt = UnbuiltModes(index, columns, memory, values, geometry=manifest.geometry)

    def close() -> None:
        executor.close()
        unbuilt.close()
        memory.close()

    return Pools(index, memory, path.kv_blocks, (executor,), {}, close, unbuilt=unbuilt)


def _mapped(artifact: Artifact, check: bool) -> NDArray[np.uint8] | None:
    """The embedded weights as they lie in their file, mapped privately: pages are read when they are first used."""
    if not artifact.manifest.weights.embedded:
        return None
    file = embedded_weights(artifact)
    if check:
        verify_files(artifact.path, (artifact.manifest.weights.file,))
    return np.memmap(file.label, np.uint8, "c", file.data_start, file.data.shape)
