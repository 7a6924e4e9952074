"""Every kernel's declaration, source and reference belong together."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ouro_build import kernels
from ouro_build.artifacts.blocks import BLOCK_COLUMNS, BLOCK_ROWS
from ouro_build.artifacts.geometry import SPARSE_MODES, Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.packing import weight_buffers
from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.builder.buffers import make_buffers
from ouro_build.builder.programs import Programs
from ouro_build.kernels import registry

FOLDER = Path(kernels.__file__).parent
MODEL = ModelConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, head_dim=16, loops=3,
    max_position=4096, rms_norm_eps=(1e-6).hex(), rope_theta=(1e6).hex(), tied_embeddings=False, dtype="bfloat16",
)  # fmt: skip
GEOMETRY = Geometry(
    buckets=(1, 8), prefill_buckets=(16, 128), max_context=1024, max_requests=8, block_size=16, sparse_modes=SPARSE_MODES,
    key_retention=0.25, key_capacity=256, reference_slots=4,
)  # fmt: skip


@cache
def recorded() -> tuple[Launch, ...]:
    """Every launch of the programs."""
    programs = Programs(MODEL, GEOMETRY, find_part("h200"), make_buffers(MODEL, GEOMETRY, weight_buffers(MODEL)))
    return tuple(launch for plan in programs.record() for launch in plan.launches)


@cache
def launches() -> dict[str, Launch]:
    """A launch of every kernel that the programs use."""
    return {launch.specialization.kernel: launch for launch in recorded()}


def source_parameters(name: str) -> list[str]:
    """Parameters of a kernel's Triton function, read without triton."""
    tree = ast.parse((FOLDER / name / "source.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in function.args.args]


def test_names_are_the_folders_with_a_source() -> None:
    made = {path.parent.name for path in FOLDER.glob("*/source.py") if f"\ndef {path.parent.name}(" in path.read_text()}
    assert made == set(registry.NAMES)


def test_declarations_need_neither_torch_nor_triton() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, triton=None)\n"
        "from ouro_build.kernels import registry\n"
        "assert [registry.kernel(n).name for n in registry.NAMES] == list(registry.NAMES)\n"
        "import ouro_build.builder.programs"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_programs_use_every_kernel() -> None:
    assert launches().keys() == set(registry.NAMES)


@pytest.mark.parametrize("name", registry.NAMES)
def test_launch_rule_and_source_agree(name: str) -> None:
    specialization = launches()[name].specialization
    declared = [argument for argument, _ in specialization.types]
    constants = {constant for constant, _ in specialization.constants}
    parameters = source_parameters(name)
    assert [p for p in parameters if p not in constants] == declared
    assert constants <= set(parameters)


@pytest.mark.parametrize("name", registry.NAMES)
def test_reference_takes_what_launches_have(name: str) -> None:
    _, parameters = registry.reference(name)
    assert set(parameters) <= set(source_parameters(name))
    assert set(registry.kernel(name).writes) <= set(parameters)
    buffers = {argument for argument, _ in launches()[name].buffers()}
    assert set(registry.kernel(name).writes) <= buffers
    assert set(registry.kernel(name).updates) <= set(registry.kernel(name).writes)


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_kernel_with_layered_buffers_is_told_the_layer_of_each_launch(name: str) -> None:
    layered, parameters = set(registry.kernel(name).layered), source_parameters(name)
    mine = [launch for launch in recorded() if launch.specialization.kernel == name]
    assert layered <= {argument for launch in mine for argument, _ in launch.buffers()}
    assert not layered or ("layer" in parameters and all(isinstance(launch.named()["layer"], int) for launch in mine))


def test_kernels_know_the_size_of_the_matrix_that_is_stored() -> None:
    """A matrix's buffer has the shape of its blocks: the launch rules take its size from other buffers."""
    seen = set()
    for launch in recorded():
        constants, weight = dict(launch.specialization.constants), launch.named().get("weight")
        if not isinstance(weight, Buffer) or len(weight.shape) != 4:
            continue
        seen.add(launch.specialization.kernel)
        size = constants["SIZE" if launch.specialization.kernel == "embedding" else "K"]
        assert isinstance(size, int)
        assert weight.sizes[1:] == (-(-size // BLOCK_COLUMNS), BLOCK_ROWS, BLOCK_COLUMNS)
        if "N" in constants:
            assert isinstance(constants["N"], int)
            assert weight.sizes[0] == -(-constants["N"] // BLOCK_ROWS)
    assert seen == {"embedding", "linear_few", "linear_many", "linear_rope", "linear_silu"}
