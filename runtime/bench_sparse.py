"""Sparse decoding measured against dense decoding of the same artifact, in one run, once all of it was found right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import ProgramKey
from ouro_build.artifacts.reader import Artifact
from ouro_build.artifacts.records import BenchCheck, SparseBenchRecord, SparseLine
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.rows import SOURCE_LOOP
from ouro_build.runtime.attention_part import AttentionArtifact, attention_key, queries
from ouro_build.runtime.bench import Bench, Shape, bucket_of, check_of, path_notes, step_bytes
from ouro_build.runtime.bench_step import DecodeStep, blocks_of, check_shape, read_rate, vary_buffer
from ouro_build.runtime.machine import device_record, probe
from ouro_build.runtime.mixed_trial import MixedTrial
from ouro_build.runtime.paths import Choice, choose_path
from ouro_build.runtime.pools import Pools
from ouro_build.runtime.retained_mass import check_retained_mass
from ouro_build.runtime.row_modes import CAPTURE, CONSUME, DENSE, MIXED, NO_CAPTURE
from ouro_build.runtime.scenes import blocks_needed
from ouro_build.runtime.timing import measure, median_ms

USUAL_SHAPES: tuple[Shape, ...] = (
    (32, 512), (32, 2048), (32, 4096), (16, 8192), (8, 4096), (8, 8192), (4, 32768), (1, 4096), (1, 8192), (1, 32768),
)  # fmt: skip
"""Rows and contexts that are measured where nobody asks for others, as far as there is room."""
_NEEDED = (DENSE, CAPTURE, CONSUME)


def bench_sparse(
    artifact: Artifact,
    shapes: Sequence[Shape] | None = None,
    *,
    executor: Choice = "auto",
    weights: str | None = None,
    device: int = 0,
    retained_mass: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> SparseBenchRecord:
    """Check the loops of every mode and whole steps of `shapes`, then time dense and sparse ones. None: the usual shapes.

    With `retained_mass` a sparse step is timed once more while its masses are copied to the host. The record has no times if a
    check failed. `say` is told what is being done. Raises UsageError for an artifact without sparse modes and for a shape that
    it or this machine has no room for, FitError if it does not fit, DeviceError if the device fails.
    """
    geometry = artifact.manifest.geometry
    missing = [mode for mode in _NEEDED if mode not in geometry.sparse_modes]
    if missing:
        hint = "Build with --sparse-modes dense,capture,consume,mixed --key-retention R."
        raise UsageError(f"the artifact was built without mode {missing[0]}", where=str(artifact.path), hint=hint)
    if retained_mass:
        check_retained_mass(geometry, str(artifact.path))
    machine = probe(device)
    path = choose_path(artifact.manifest, machine, executor, None)
    with_attention = AttentionArtifact(artifact.path, artifact.manifest, artifact.identity)
    bench = _SparseBench(with_attention, path, machine, weights, device)
    if shapes is None:
        shapes = [shape for shape in USUAL_SHAPES if _has_room(geometry, shape, path.kv_blocks)] or [(1, geometry.max_context)]
    for shape in shapes:
        _check_room(geometry, shape, path.kv_blocks)
    return bench.compare(shapes, say, retained_mass=retained_mass)


def _has_room(geometry: Geometry, shape: Shape, kv_blocks: int) -> bool:
    try:
        _check_room(geometry, shape, kv_blocks)
    except UsageError:
        return False
    return True


def _check_room(geometry: Geometry, shape: Shape, kv_blocks: int) -> None:
    check_shape(geometry, *shape, kv_blocks)
    if geometry.references and shape[0] > geometry.reference_slots:
        what = f"{shape[0]} rows, there are {geometry.reference_slots} reference slots"
        raise UsageError(what, where="--rows", hint="Take fewer rows, or build with more --reference-slots.")


class _SparseBench(Bench):
    def compare(self, shapes: Sequence[Shape], say: Callable[[str], None], *, retained_mass: bool) -> SparseBenchRecord:
        """Check, and time what is right."""
        manifest = self.artifact.manifest
        say("checking programs in made-up states")
        buckets = sorted({bucket_of(manifest, rows) for rows, _ in shapes})
        with self.opened(blocks_needed(manifest.geometry, buckets[-1])) as pools:
            forms = _forms(manifest.geometry)
            checks, unchecked = self.programs(pools, [ProgramKey("recurrent", b, *form) for b in buckets for form in forms])
            say("checking mixed rows against uniform ones")
            checks += self._mixed(pools, buckets)
        record = SparseBenchRecord(
            identity=self.artifact.identity,
            target=self.path.target.part.name,
            executor=self.path.executor,
            device=device_record(self.machine) if self.path.on_device else None,
            unchecked=unchecked,
            checks=checks,
            key_retention=manifest.geometry.key_retention,
            read_bytes=manifest.weights.bytes,
            read_tb_s=None,
            lines=(),
            notes=path_notes(self.path),
        )
        if not record.right:
            return record
        blocks = max(rows * blocks_of(manifest.geometry, context) for rows, context in shapes)
        with self.opened(blocks) as pools:
            steps = [check for shape in shapes for check in self._steps(pools, shape, say)]
            record = msgspec.structs.replace(record, checks=(*record.checks, *steps), notes=(*record.notes, *pools.every_note))
            return self._with_lines(record, pools, shapes, say, retained_mass=retained_mass) if record.right else record

    def _mixed(self, pools: Pools, buckets: Sequence[int]) -> tuple[BenchCheck, ...]:
        """`mixed`, where it was built, against the uniform modes."""
        if MIXED not in self.artifact.manifest.geometry.sparse_modes:
            return ()
        trial = MixedTrial(self.artifact.manifest, pools)
        return tuple(
            check_of("uniform", bucket, trial.compare(bucket, variant), mode=MIXED, variant=variant)
            for bucket in buckets
            for variant in ("", NO_CAPTURE)
        )

    def _steps(self, pools: Pools, shape: Shape, say: Callable[[str], None]) -> list[BenchCheck]:
        rows, context = shape
        say(f"checking steps of {rows} rows, context {context}")
        bucket = bucket_of(self.artifact.manifest, rows)
        return [
            check_of("step", bucket, self._step(pools, shape, sparse=sparse).compare(), mode=mode, context=context)
            for mode, sparse in ((DENSE, False), ("sparse", True))
        ]

    def _step(self, pools: Pools, shape: Shape, *, sparse: bool, retained_mass: bool = False) -> DecodeStep:
        m = self.artifact.manifest
        return DecodeStep(m.model, m.geometry, pools, *shape, sparse=sparse, varied=True, retained_mass=retained_mass)

    def _with_lines(
        self,
        record: SparseBenchRecord,
        pools: Pools,
        shapes: Sequence[Shape],
        say: Callable[[str], None],
        *,
        retained_mass: bool,
    ) -> SparseBenchRecord:
        rate = read_rate(pools, record.read_bytes)
        lines = []
        for shape in shapes:
            say(f"timing {shape[0]} rows, context {shape[1]}")
            lines.append(self._line(pools, shape, rate, retained_mass=retained_mass))
        return msgspec.structs.replace(record, read_tb_s=rate, lines=tuple(lines))

    def _line(self, pools: Pools, shape: Shape, rate: float | None, *, retained_mass: bool) -> SparseLine:
        manifest, (rows, context) = self.artifact.manifest, shape
        model, geometry = manifest.model, manifest.geometry
        dense = median_ms(self._step(pools, shape, sparse=False).seconds())
        sparse_step = self._step(pools, shape, sparse=True)
        sparse = median_ms(sparse_step.seconds())
        attention = [self._attention(pools, sparse_step, modes) for modes in (dense_loops(model), sparse_loops(model))]
        mass_ms, mass = None, None
        if retained_mass:
            watched = self._step(pools, shape, sparse=True, retained_mass=True)
            mass_ms, mass = median_ms(watched.seconds()), watched.mean_mass()
        return SparseLine(
            rows=rows,
            bucket=bucket_of(manifest, rows),
            context=context,
            retained=int(retained_counts(context, geometry.key_retention)[-1]),
            attention_dense_ms=attention[0],
            attention_sparse_ms=attention[1],
            attention_ratio=attention[1] / attention[0],
            attention_dense_share=_share(rows * context * model.kv_bytes_per_token, attention[0], rate),
            dense_ms=dense,
            sparse_ms=sparse,
            ratio=sparse / dense,
            dense_share=_share(step_bytes(manifest, rows, context), dense, rate),
            mass_ms=mass_ms,
            mass=mass,
        )

    def _attention(self, pools: Pools, step: DecodeStep, modes: Sequence[str]) -> float:
        """Milliseconds of the attention of one loop in each of `modes`, for the rows of `step`."""
        keys = [attention_key(bucket_of(self.artifact.manifest, step.rows), mode) for mode in modes]
        executor = pools.executors[0]
        vary_buffer(pools.memory, queries(pools.index, bucket_of(self.artifact.manifest, step.rows)))
        step.start()

        def run() -> None:
            for key in keys:
                executor.run(key)

        return median_ms(measure(run, pools.memory.synchronize))


def dense_loops(model: ModelConfig) -> list[str]:
    """The mode of every loop of a dense token."""
    return [DENSE] * model.loops


def sparse_loops(model: ModelConfig) -> list[str]:
    """The mode of every loop of a sparse token."""
    modes = (DENSE if u < SOURCE_LOOP else CAPTURE if u == SOURCE_LOOP else CONSUME for u in range(model.loops))
    return list(modes)


def _forms(geometry: Geometry) -> tuple[tuple[str, str], ...]:
    """(mode, variant) of every form of `recurrent` that was built."""
    variants = ((MIXED, NO_CAPTURE),) if MIXED in geometry.sparse_modes else ()
    return (*((mode, "") for mode in geometry.sparse_modes), *variants)


def _share(moved: int, ms: float, rate: float | None) -> float | None:
    return None if rate is None else moved / ms / 1e9 / rate
