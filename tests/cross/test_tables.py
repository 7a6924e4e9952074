"""Every entry of a shipped tuning table compiles for its architecture, within its limits and without spills."""

from __future__ import annotations

import os

import pytest

from ouro_build.artifacts.parts import Part, find_part
from ouro_build.artifacts.plan import Launch
from ouro_build.artifacts.tuning import Entry, decode_table
from ouro_build.builder.cache import ImageCache
from ouro_build.builder.compile import compile_images, jobs
from ouro_build.builder.limits import check_limits
from ouro_build.builder.toolchain import find_toolchain
from ouro_build.kernels.sites import site_of
from ouro_build.kernels.tuning import SHIPPED, tuning_of
from tests.kernel_cases.tuned import USED, launch_of

EVERY = os.environ.get("OURO_TEST_EVERY_IMAGE") == "1"


def compiled(arch: str, entries: list[Entry], cache: ImageCache) -> None:
    """Compile them all, for as few rows as use them too, and check what came of it."""
    part = find_part(arch)
    launches = [(entry, launch) for entry in entries for launch in launches_of(part, entry)]
    wanted = jobs([launch.specialization for _, launch in launches], arch, find_toolchain([part]))
    images = compile_images(wanted, cache, workers=2).images
    for job, (entry, _) in zip(wanted, launches, strict=True):
        image = images[job.key]
        print(f"{entry.place}: {image.registers} registers, {image.spills} B spilled, {image.shared} B shared")
        check_limits(part, job.specialization, image)
        assert image.spills == 0, f"{entry.place} spills {image.spills} bytes on {arch}: {job}"


def launches_of(part: Part, entry: Entry) -> list[Launch]:
    """For its own rows, and for 1, 2 and 4, which make other kernels each, where there is nothing nearer."""
    own = launch_of(part, entry)
    assert used(part, own) == entry, f"{entry.place} is not what is used there"
    fewer = (launch_of(part, entry, rows) for rows in (1, 2, 4) if rows < entry.rows)
    return [own, *(launch for launch in fewer if used(part, launch) == entry)]


def used(part: Part, launch: Launch) -> Entry | None:
    """The entry by which the launch was configured."""
    site = site_of(launch)
    assert site is not None
    return tuning_of(part).find(site)


@pytest.mark.parametrize("arch", sorted(path.stem for path in SHIPPED.glob("*.json")))
def test_every_entry_compiles(arch: str, image_cache: ImageCache) -> None:
    """In the fast run one number of rows alone, and what presets of full size use."""
    table = decode_table((SHIPPED / f"{arch}.json").read_bytes(), arch)
    assert table.arch == arch
    entries = [e for e in table.entries if EVERY or (e.rows == 8 and (e.kernel, e.kind) in USED)]
    assert len(entries) >= len(USED)
    compiled(arch, entries, image_cache)
