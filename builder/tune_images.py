"""Images of steps that are tried: compiled on every core, and refused before they run if they spill or do not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ouro_build.artifacts.errors import CompileError
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Specialization
from ouro_build.artifacts.tuning import FORMS
from ouro_build.builder.cache import Image, ImageCache
from ouro_build.builder.compile import compile_images, jobs
from ouro_build.builder.limits import check_limits
from ouro_build.builder.toolchain import Toolchain


@dataclass
class TriedImages:
    """Every image that was asked for so far, or why there is none that can be launched; what only launches is no part of it."""

    part: Part
    toolchain: Toolchain
    cache: ImageCache
    workers: int
    _images: dict[Specialization, Image] = field(default_factory=dict)
    _refused: dict[Specialization, str] = field(default_factory=dict)

    def compile(self, wanted: Iterable[Specialization]) -> None:
        """Make what is not there yet. Raises CompileError only if the compilers themselves fail."""
        known = self._images.keys() | self._refused.keys()
        missing = [s for s in dict.fromkeys(s.compiled() for s in wanted) if s not in known]
        work = jobs(missing, self.part.arch, self.toolchain)
        failed: dict[str, CompileError] = {}
        made = compile_images(work, self.cache, self.workers, refused=failed).images
        for job in work:
            image = made.get(job.key)
            reason = failed[job.key].what.splitlines()[0] if image is None else self._reason(job.specialization, image)
            if image is not None:
                self._images[job.specialization] = image
            if reason:
                self._refused[job.specialization] = reason

    def spills(self, specializations: Iterable[Specialization]) -> dict[Specialization, int]:
        """Those that were compiled for a table's configuration and spill, with the bytes of a thread."""
        made = ((s, self._images.get(s.compiled())) for s in specializations if s.kernel in FORMS)
        return {s: image.spills for s, image in made if image is not None and image.spills}

    def refusal(self, specializations: Sequence[Specialization], first: Collection[Specialization] = ()) -> str:
        """Why one of them must not run; empty if all may. Those that the `first` step has may spill: it is what runs today."""
        refused = next((self._refused[s.compiled()] for s in specializations if s.compiled() in self._refused), "")
        today = {s.compiled() for s in first}
        spilled = self.spills(s for s in specializations if s.compiled() not in today)
        return refused or next((f"a thread spills {size} bytes" for size in spilled.values()), "")

    def images(self, specializations: Sequence[Specialization]) -> tuple[Image, ...]:
        """Their images, in order: all must have been compiled, and not refused."""
        return tuple(self._images[s.compiled()] for s in specializations)

    def _reason(self, specialization: Specialization, image: Image) -> str:
        """Why it cannot be launched. Kernels that no table configures are as the build has them: none of those is refused."""
        if specialization.kernel not in FORMS:
            return ""
        try:
            check_limits(self.part, specialization, image)
        except CompileError as error:
            return error.what
        return ""
