"""Puts the pieces of a build together: the manifest and the files that it lists."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ouro_build.artifacts.manifest import WEIGHTS, ImageRecord, Manifest, TargetRecord, WeightsRecord
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Specialization
from ouro_build.artifacts.retention import RETENTION, retained_counts
from ouro_build.artifacts.writer import Content, plan_files, plan_paths
from ouro_build.builder.buffers import kv_layout
from ouro_build.builder.cache import Image
from ouro_build.builder.compile import Job
from ouro_build.builder.plan_target import Preparation, Target
from ouro_build.builder.tokenizer_files import tokenizer_files
from ouro_build.builder.toolchain import Toolchain
from ouro_build.builder.tuned import check_image

_DIGEST_DIGITS = 12

Images = Mapping[str, Image]
"""Compiled images by content key."""
Work = Mapping[str, Sequence[Job]]
"""The images of every part by its name, in the order of its plan index."""


def manifest(preparation: Preparation, work: Work, images: Images, weights: WeightsRecord, toolchain: Toolchain) -> Manifest:
    """The manifest without what writing fills in. Raises CompileError for an image that is over a limit of its part."""
    source, kv = preparation.source, kv_layout(preparation.source.model, preparation.geometry)
    return Manifest(
        model=source.model,
        source=source.record,
        geometry=preparation.geometry,
        modes=preparation.geometry.sparse_modes,
        kv=kv,
        kv_digest=kv.digest,
        weights=weights,
        targets=tuple(target_record(t, work[t.part.name], images, toolchain) for t in preparation.targets),
        toolchain=toolchain.packages(),
        stop_ids=source.stop_ids,
    )


def target_record(target: Target, work: Sequence[Job], images: Images, toolchain: Toolchain) -> TargetRecord:
    """The record of one part. Raises CompileError for an image that is over a limit of it."""
    for job in work:
        check_image(target.part, job.specialization, images[job.key], target.chosen)
    index, columns = plan_paths(target.part.name)
    return TargetRecord(
        part=target.part,
        ptxas=toolchain.ptxas_release(target.part.arch),
        tuning=target.tuning,
        plan_index=index,
        plan_columns=columns,
        images=tuple(_recorded(target.part, job, images[job.key]) for job in work),
        memory=target.memory,
    )


def files(preparation: Preparation, complete: Manifest, work: Work, images: Images) -> dict[str, Content]:
    """Every file of the artifact by its path, but for the manifest and the oracle. Embedded weights are there already."""
    found = plan_files(complete, {t.part.name: (t.index, t.columns) for t in preparation.targets})
    for target in preparation.targets:
        made = ((job, images[job.key]) for job in work[target.part.name])
        found |= {_image_path(target.part, job, image): image.cubin for job, image in made}
    if complete.weights.embedded:
        found[WEIGHTS] = complete.weights.file
    if preparation.geometry.references:
        found[RETENTION] = retained_counts(preparation.geometry.max_context, preparation.geometry.key_retention).tobytes()
    if preparation.source.folder is not None:
        found |= {f"tokenizer/{name}": text for name, text in tokenizer_files(preparation.source.folder).items()}
    return found


def _image_path(part: Part, job: Job, image: Image) -> str:
    """Named by the image's own digest: how images are cached between builds is no part of an artifact."""
    digest = hashlib.sha256(image.cubin).hexdigest()
    return f"images/{part.name}/{job.specialization.kernel}-{digest[:_DIGEST_DIGITS]}.cubin"


def _recorded(part: Part, job: Job, image: Image) -> ImageRecord:
    return image_record(_image_path(part, job, image), job.specialization, image)


def image_record(path: str, specialization: Specialization, image: Image) -> ImageRecord:
    """The record of an image that lies at `path`."""
    return ImageRecord(
        path=path,
        function=image.function,
        registers=image.registers,
        spills=image.spills,
        shared=image.shared,
        num_warps=specialization.options.num_warps,
        cluster=(1, 1, 1),
        cooperative=False,
        parameters=image.parameters,
    )
