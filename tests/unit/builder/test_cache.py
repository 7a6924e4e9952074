"""The image cache: keys by content, entries that are whole or absent."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ouro_build import kernels
from ouro_build.artifacts.errors import UsageError
from ouro_build.artifacts.plan import Options, Specialization
from ouro_build.builder.cache import Image, ImageCache, default_folder, image_key, source_digest
from ouro_build.builder.toolchain import Toolchain
from ouro_build.kernels import registry

IMAGE = Image(cubin=b"\x7fELF" * 100, function="f", registers=32, spills=0, shared=16, parameters=((0, 8), (8, 4)))
KEY = "ab" * 32
SPEC = Specialization(
    kernel="rms_norm", contract=1, types=(("rows", "*i32"),), constants=(("SIZE", 64),), divisible=("rows",),
    options=Options(num_warps=4, num_stages=1),
)  # fmt: skip
TOOLS = Toolchain("0", "3.9.0", "2.13.0", {"sm_90": "13.4.59", "sm_120": "13.4.59"})


def test_what_was_put_is_found(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path)
    assert cache.get(KEY) is None
    cache.put(KEY, IMAGE)
    assert cache.get(KEY) == IMAGE
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [KEY[2:]]


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: raw[:40] + b"x" + raw[41:], lambda raw: b"", lambda raw: raw + b"x"]
)
def test_a_damaged_entry_is_absent_and_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    cache = ImageCache(tmp_path)
    cache.put(KEY, IMAGE)
    entry = tmp_path / KEY[:2] / KEY[2:]
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache.get(KEY) is None
    cache.put(KEY, IMAGE)
    assert cache.get(KEY) == IMAGE


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ImageCache(tmp_path / "file" / "below")
    cache.put(KEY, IMAGE)
    assert cache.get(KEY) is None


def test_an_image_proved_by_another_rule_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached image is not proved again: what was asked of it is in its key."""
    before = image_key(SPEC, "sm_90", TOOLS)
    kernel = registry.kernel(SPEC.kernel)
    monkeypatch.setattr(registry, "kernel", lambda name: dataclasses.replace(kernel, weights=()))
    assert kernel.weights
    assert image_key(SPEC, "sm_90", TOOLS) != before


def test_everything_that_decides_an_image_is_in_its_key() -> None:
    replace = msgspec.structs.replace
    keys = {
        image_key(SPEC, "sm_90", TOOLS),
        image_key(SPEC, "sm_120", TOOLS),
        image_key(SPEC, "sm_90", Toolchain("0", "3.6.0", "2.13.0", TOOLS.ptxas)),
        image_key(SPEC, "sm_90", Toolchain("0", "3.9.0", "2.13.0", {"sm_90": "12.9.86"})),
        image_key(replace(SPEC, constants=(("SIZE", 65),)), "sm_90", TOOLS),
        image_key(replace(SPEC, divisible=()), "sm_90", TOOLS),
        image_key(replace(SPEC, options=Options(num_warps=8, num_stages=1)), "sm_90", TOOLS),
    }
    assert len(keys) == 7


def test_how_an_image_is_launched_is_not_in_its_key() -> None:
    options = msgspec.structs.replace(SPEC.options, carveout=100)
    launched = msgspec.structs.replace(SPEC, options=options)
    assert launched != launched.compiled() == SPEC
    assert image_key(launched, "sm_90", TOOLS) == image_key(SPEC, "sm_90", TOOLS)


def test_versions_that_decide_no_image_are_not_in_its_key() -> None:
    assert image_key(SPEC, "sm_90", TOOLS) == image_key(SPEC, "sm_90", Toolchain("1", "3.9.0", "2.11.0", TOOLS.ptxas))


def test_a_source_digest_covers_the_modules_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "k" / "source.py").write_text("from ouro_build.kernels.shared import helper\n")
    (tmp_path / "shared.py").write_text("import ouro_build.kernels.deep\n")
    (tmp_path / "deep.py").write_text("x = 1\n")
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "__init__.py"))

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest("ouro_build.kernels.k.source")

    seen = {digest()}
    for name in ("k/source.py", "shared.py", "deep.py"):
        path = tmp_path / name
        path.write_text(path.read_text() + "# changed\n")
        seen.add(digest())
    source_digest.cache_clear()
    assert len(seen) == 4


def test_keys_need_no_triton() -> None:
    program = (
        "import sys; from ouro_build.builder.cache import source_digest;"
        "source_digest('ouro_build.kernels.rms_norm.source'); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "ouro-build"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path(os.path.expanduser("~")) / ".cache" / "ouro-build"


def test_a_user_without_a_home_is_told_which_flag_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(UsageError, match="--cache-dir: this user has no home folder"):
        default_folder()
