"""What is decided about images and toolchains without compiling: limits, parameter checks, versions, the KV layout."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from ouro_build.artifacts.errors import CompileError, MissingExtraError
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Options, Specialization
from ouro_build.builder import compile as compile_module
from ouro_build.builder import toolchain
from ouro_build.builder.buffers import kv_layout
from ouro_build.builder.cache import Image
from ouro_build.builder.compile import Job, checked_image
from ouro_build.builder.cubin import CubinInfo, read_cubin
from ouro_build.builder.limits import check_limits
from ouro_build.builder.oracle import oracle_prompt
from tests.unit.builder.plans import GEOMETRY, MODEL

SPEC = Specialization(
    kernel="rms_norm", contract=1, types=(("rows", "*i32"), ("eps", "fp32")), constants=(("SIZE", 64),), divisible=(),
    options=Options(num_warps=8, num_stages=1),
)  # fmt: skip
IMAGE = Image(cubin=b"", function="rms_norm", registers=64, spills=0, shared=1024, parameters=())
LAYOUT = ((0, 8), (8, 4), (16, 8), (24, 8))
POINTERS = ((0, 8), (8, 8), (16, 8), (24, 8))


def changed(options: dict[str, object], **fields: object) -> Specialization:
    return msgspec.structs.replace(SPEC, options=msgspec.structs.replace(SPEC.options, **options), **fields)


def test_an_image_within_the_limits() -> None:
    check_limits(find_part("sm_120"), SPEC, msgspec.structs.replace(IMAGE, shared=99 * 1024))
    asking = msgspec.structs.replace(SPEC, options=msgspec.structs.replace(SPEC.options, shared=100 * 1024))
    with pytest.raises(CompileError, match="a block needs 102400 bytes of shared memory; sm_120 has 101376"):
        check_limits(find_part("sm_120"), asking, IMAGE)


@pytest.mark.parametrize(
    ("spec", "image", "text"),
    [
        (SPEC, {"shared": 99 * 1024 + 1}, "101377 bytes of shared memory; sm_120 has 101376"),
        (changed({"num_warps": 32}), {"registers": 72}, "73728 registers; sm_120 has 65536"),
        (changed({"num_warps": 64}), {"registers": 8}, "2048 threads; sm_120 has 1024"),
    ],
)
def test_an_image_over_a_limit_is_named_with_its_figures(spec: Specialization, image: dict[str, int], text: str) -> None:
    with pytest.raises(CompileError) as caught:
        check_limits(find_part("sm_120"), spec, msgspec.structs.replace(IMAGE, **image))
    assert text in str(caught.value)
    assert "kernel rms_norm (SIZE=64) for --gpu rtx-5090" in str(caught.value)


def test_the_same_image_fits_another_part() -> None:
    big = msgspec.structs.replace(IMAGE, shared=200 * 1024)
    check_limits(find_part("sm_90"), SPEC, big)
    with pytest.raises(CompileError):
        check_limits(find_part("sm_80"), SPEC, big)


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    spec: Specialization = SPEC,
    ptx: str = "",
    parameters: tuple[tuple[int, int], ...] = LAYOUT,
    **fields: int,
) -> Image:
    monkeypatch.setattr(compile_module, "read_cubin", lambda cubin, function: CubinInfo(40, 8, parameters))
    values = {
        "name": "rms_norm",
        "shared": 16,
        "num_warps": 8,
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    return checked_image(Job("k", spec, "sm_90"), b"cubin", ptx, SimpleNamespace(**{**values, **fields}))


def test_a_compiled_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    image = compiled(monkeypatch)
    assert (image.registers, image.spills, image.shared, image.parameters) == (40, 8, 16, LAYOUT)


def test_other_parameters_than_the_plans_pass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="expected"):
        compiled(monkeypatch, parameters=LAYOUT[:3])
    with pytest.raises(CompileError, match="expected"):
        compiled(monkeypatch, parameters=((0, 8), (8, 8), (16, 8), (24, 8)))


@pytest.mark.parametrize("field", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_that_wants_scratch_is_refused(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    with pytest.raises(CompileError, match="scratch"):
        compiled(monkeypatch, SPEC, "", LAYOUT, **{field: 128})


def test_a_kernel_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="4 warps"):
        compiled(monkeypatch, num_warps=4)
    with pytest.raises(CompileError, match="clusters of 2"):
        compiled(monkeypatch, num_ctas=2)


def entry(*instructions: str) -> str:
    """PTX of a kernel of two pointers, the second to weights."""
    loads = ("ld.param.b64 %rd1, [k_param_0];", "ld.param.b64 %rd2, [k_param_1];")
    return "\n".join(
        [".visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)", "{", *loads, *instructions, "ret;", "}"]
    )


def test_programmatic_launches_are_declared_and_keep_their_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    programmatic = changed({"programmatic": True})
    programmatic = msgspec.structs.replace(programmatic, types=(("rows", "*i32"), ("weight", "*fp32")))
    rows, weight = 0, 1

    def early(parameter: int) -> str:
        return entry(f"ld.param.b64 %rd3, [k_param_{parameter}];", "ld.global.b32 %r1, [%rd3];", "griddepcontrol.wait;")

    compiled(monkeypatch, programmatic, early(weight), POINTERS)
    with pytest.raises(CompileError, match="reads what is not early"):
        compiled(monkeypatch, programmatic, early(rows), POINTERS)
    with pytest.raises(CompileError, match="no wait that every program reaches"):
        compiled(monkeypatch, programmatic, entry("griddepcontrol.launch_dependents;"), POINTERS)
    with pytest.raises(CompileError, match="not declared programmatic"):
        compiled(monkeypatch, SPEC, entry("griddepcontrol.launch_dependents;"))


@pytest.mark.parametrize("raw", [b"", b"\x7fELF", b"not a cubin" * 50, b"\x7fELF\x02\x01" + bytes(200)])
def test_what_is_no_cubin(raw: bytes) -> None:
    with pytest.raises(CompileError, match="cannot be read"):
        read_cubin(raw, "rms_norm")


def said(release: str) -> str:
    return f"Cuda compilation tools, release {release}, V{release}.86"


def test_a_ptxas_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_ptxas_versions", lambda wanted: {"90": said("12.6"), "120": said("12.6")})
    monkeypatch.setattr(toolchain, "_required", lambda package: "3.6.0")
    assert toolchain.find_toolchain([find_part("h100")]).ptxas_release("sm_90") == "12.6"
    with pytest.raises(CompileError) as caught:
        toolchain.find_toolchain([find_part("h100"), find_part("rtx-5090")])
    assert "triton 3.6.0 brings ptxas 12.6.86; sm_120 needs 12.8" in str(caught.value)
    assert caught.value.where == "--gpu rtx-5090"


def test_a_missing_compiler_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"ouro-build\[build\]"):
        toolchain.find_toolchain([find_part("h100")])


def test_compilers_see_none_of_the_settings_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_PTXAS_PATH", "TRITON_INTERPRET", "USE_IR_LOC", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT"):
        monkeypatch.setenv(name, "1")
    assert not {n for n in toolchain.clean_environment() if n.startswith("TRITON") or n in ("USE_IR_LOC", "PTXAS_OPTIONS")}


def test_every_plane_of_the_kv_layout_belongs_to_one_loop_and_layer() -> None:
    layout = kv_layout(MODEL, GEOMETRY)
    assert layout.planes == ((0, 1), (2, 3))
    assert layout.axes == ("plane", "block", "key_value", "kv_head", "position", "head_dim")
    assert layout.block_size == GEOMETRY.block_size


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 49152])
def test_the_oracles_prompt_is_in_the_vocabulary(vocabulary: int) -> None:
    prompt = oracle_prompt(vocabulary)
    assert len(prompt) == 16
    assert all(0 <= i < vocabulary for i in prompt)
    assert len(set(prompt)) >= min(vocabulary, 16) // 2
