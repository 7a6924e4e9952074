"""A build from end to end: model → programs → memory plan → images → artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ouro_build.artifacts.manifest import ORACLE, WEIGHTS, Manifest, WeightsRecord, encode_manifest, identity
from ouro_build.artifacts.oracle import Oracle, encode_oracle
from ouro_build.artifacts.publish import check_output, publishing
from ouro_build.artifacts.weight_stream import write_weights
from ouro_build.artifacts.writer import write_artifact
from ouro_build.builder import assemble
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.compile import Job, compile_images, jobs
from ouro_build.builder.oracle import make_oracle
from ouro_build.builder.plan_target import Preparation, Target
from ouro_build.builder.toolchain import Toolchain, find_toolchain
from ouro_build.builder.tuned import spilled_shapes


@dataclass(frozen=True)
class Built:
    """A published artifact. `cached` of its `images` distinct images came from the cache; `notes` are to be told."""

    path: Path
    identity: str
    manifest: Manifest
    images: int
    cached: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reporter:
    """Whom a build tells what it does: the name of each phase as it begins, and (done, total) images."""

    phase: Callable[[str], None] = lambda name: None
    images: Callable[[int, int], None] = lambda done, total: None


def build(
    preparation: Preparation,
    output: Path,
    *,
    cache: ImageCache,
    workers: int,
    force: bool = False,
    report: Reporter | None = None,
) -> Built:
    """Compile, write and publish at `output`. Until the end there is nothing under that name, or what was there before.

    `workers` processes compile. Raises CompileError, CheckpointError or OutputError, and MissingExtraError without torch
    or triton.
    """
    report = report or Reporter()
    check_output(output, force=force)
    toolchain = find_toolchain(preparation.spec.parts)
    work = {t.part.name: _jobs(t, toolchain) for t in preparation.targets}
    with publishing(output, force=force) as folder:
        report.phase("compiling")
        compiled = compile_images([job for listed in work.values() for job in listed], cache, workers, report.images)
        report.phase("writing weights" if preparation.spec.embed_weights else "hashing weights")
        weights = _write_weights(preparation, folder)
        manifest = assemble.manifest(preparation, work, compiled.images, weights, toolchain)
        files = assemble.files(preparation, manifest, work, compiled.images)
        report.phase("running the reference")
        files[ORACLE] = encode_oracle(_oracle(preparation))
        report.phase("publishing")
        written = write_artifact(folder, manifest, files)
    notes = [
        note
        for target, record in zip(preparation.targets, written.targets, strict=True)
        for note in spilled_shapes(record, target.index.specializations, toolchain.triton, target.chosen)
    ]
    return Built(output, identity(encode_manifest(written)), written, len(compiled.images), compiled.cached, tuple(notes))


def _jobs(target: Target, toolchain: Toolchain) -> tuple[Job, ...]:
    return jobs(target.index.specializations, target.part.arch, toolchain, target.chosen)


def _write_weights(preparation: Preparation, folder: Path) -> WeightsRecord:
    """Write the packed weights in one pass, or with weights by reference only take their digests."""
    source = preparation.source
    if not preparation.spec.embed_weights:
        return write_weights(source.weights, source.model, None)
    with (folder / WEIGHTS).open("xb") as file:
        return write_weights(source.weights, source.model, file)


def _oracle(preparation: Preparation) -> Oracle:
    """By the programs of the first part: the reference means the same for all."""
    source = preparation.source
    return make_oracle(source.model, preparation.geometry, preparation.targets[0].part, source.weights)
