"""`ouro-artifact tune` from end to end over the fake driver, with images of no meaning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from ouro_build.artifacts.columns import SCRATCH_ARGUMENTS, decode
from ouro_build.artifacts.console import Output, exit_code
from ouro_build.artifacts.errors import BuildError, CompileError, OutputError, UsageError
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import ProgramKey, Specialization
from ouro_build.artifacts.reader import Artifact, open_artifact
from ouro_build.artifacts.tuning import FORMS, Residency, TuningTable, decode_table
from ouro_build.builder import build as build_module
from ouro_build.builder import tune as tune_module
from ouro_build.builder import tune_bench, tune_images, tune_residency, tune_search
from ouro_build.builder.artifact_cli import cli
from ouro_build.builder.cache import Image, ImageCache
from ouro_build.builder.compile import Compiled, Job
from ouro_build.builder.plan_target import prepare
from ouro_build.builder.record import residency_key
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.builder.toolchain import Toolchain
from ouro_build.builder.tune import TuneOptions, TuneResult, tune
from ouro_build.builder.tune_view import draw
from ouro_build.kernels import tuning as tuning_module
from ouro_build.kernels.sites import site_of
from tests.artifact_maker import make_artifact
from tests.unit.runtime.fake_driver import FakeDriver, Node, cubin

TOOLCHAIN = Toolchain("0", "3.9.0", "2.13", {"sm_90": "13.0.1"})
_BYTES = {"i32": 4, "fp32": 4}
VOCABULARY = 512


def parameters(specialization: Specialization) -> tuple[tuple[int, int], ...]:
    """(offset, size) of a kernel's parameters, naturally aligned."""
    sizes = [_BYTES.get(kind, 8) for _, kind in specialization.types] + [8] * SCRATCH_ARGUMENTS
    found, at = [], 0
    for size in sizes:
        at = -(-at // size) * size
        found.append((at, size))
        at += size
    return tuple(found)


def image(specialization: Specialization) -> Image:
    """Spills where 255 registers are allowed; the name of an LM head's says what it does to the logits."""
    constants, options = dict(specialization.constants), specialization.options
    name = specialization.kernel
    if name == "linear_few" and constants["N"] == VOCABULARY:
        name = {2: "head_that_wavers", 4: "head_that_errs"}.get(options.num_warps, name)
    layout = parameters(specialization)
    return Image(
        cubin=cubin(name, layout),
        function=name,
        registers=32,
        spills=16 if options.maxnreg == 255 else 0,
        shared=1024,
        parameters=layout,
    )


def compile_images(
    wanted: Sequence[Job], cache: ImageCache, workers: int, progress: Any = None, refused: dict[str, CompileError] | None = None
) -> Compiled:
    """Fails for 184 registers, as a compiler might."""
    bad = [job for job in wanted if job.specialization.options.maxnreg == 184]
    if refused is not None:
        refused.update({job.key: CompileError("the compiler says no", where=str(job)) for job in bad})
    return Compiled({job.key: image(job.specialization) for job in wanted if job not in bad}, 0)


@pytest.fixture(scope="module", autouse=True)
def no_residency() -> Iterator[None]:
    """Shipped tables ask for nothing that is the whole of a step: what is measured here is."""
    real = tuning_module.shipped

    def without(part: Part) -> TuningTable:
        return msgspec.structs.replace(real(part), residency=())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_module, "shipped", without)
        yield


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("tune")
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 2, 16), (16,), max_context=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "compile_images", compile_images)
        patch.setattr(build_module, "find_toolchain", lambda parts: TOOLCHAIN)
        path = build_module.build(prepare(spec), folder / "a.ouro", cache=ImageCache(folder / "images"), workers=1).path
    return open_artifact(path)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A device on which a step takes a microsecond a block of `linear_few`, and a millisecond besides."""
    made = FakeDriver(memory=4 << 30)

    def measure(run: Callable[[], object], synchronize: Callable[[], object], hopeless: float) -> list[float]:
        synchronize()
        before = len(made.executed)
        run()
        synchronize()
        blocks = sum(node.grid[0] for node in made.executed[before:] if node.kernel.name == "linear_few")
        return [(1000 + blocks) * 1e-6]

    monkeypatch.setattr(tune_bench, "measure", measure)
    monkeypatch.setattr(tune_images, "compile_images", compile_images)
    monkeypatch.setattr(tune_module, "find_toolchain", lambda parts: TOOLCHAIN)
    monkeypatch.setattr(tune_residency, "TRIALS", 3)
    noise = itertools.count()

    def write(value: Callable[[], int]) -> Callable[[FakeDriver, Node], None]:
        return lambda driver, node: driver.view(node.arguments[3], 4).view("<u4").fill(value())

    made.behaviours |= {"head_that_wavers": write(lambda: next(noise)), "head_that_errs": write(lambda: 0x7F800000)}
    return made


def options(tmp_path: Path, **changes: Any) -> TuneOptions:
    return TuneOptions(cache=ImageCache(tmp_path / "images"), workers=1, **changes)


def tuned(artifact: Artifact, tmp_path: Path, api: FakeDriver, say: Any = lambda text: None, **changes: Any) -> TuneResult:
    return tune(artifact, tmp_path / "t.json", options(tmp_path, **changes), say, api)


def test_faster_configurations_are_found_and_a_build_takes_them(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    said: list[str] = []
    found = tuned(artifact, tmp_path, api, said.append, kernels=("linear_few",), buckets=(2,))
    assert api.live() == {}
    (step,) = found.steps
    assert (step.family, step.bucket, step.context) == ("decode", 2, 64)
    assert step.us < step.before_us
    table = decode_table((tmp_path / "t.json").read_bytes(), "t")
    assert table.digest == found.digest
    assert (table.arch, table.context, table.toolchain) == ("sm_90", 64, TOOLCHAIN.packages())
    assert table.device is not None
    assert table.device.name == "Fake GPU"
    assert {(e.kernel, e.rows) for e in table.entries} == {("linear_few", 2)}
    assert all(e.measured is not None and e.measured.before_us >= e.measured.us == step.us for e in table.entries)
    assert sum(site.gained_us for site in step.sites) == pytest.approx(step.before_us - step.us)
    text = "\n".join(said)
    for reason in (
        "a thread spills 16 bytes",
        "the compiler says no",
        "two runs leave different bits",
        "results differ by inf",
    ):
        assert reason in text
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (2,), (16,), max_context=64, tuning=(table,))
    (target,) = prepare(spec).targets
    assert target.notes == ()
    assert set(target.chosen.values()) == set(table.entries)


def test_refused_images_are_never_loaded(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []
    load = api.cuLibraryLoadData

    def watched(image: bytes, *rest: Any) -> Any:
        loaded.append(bytes(image))
        return load(image, *rest)

    monkeypatch.setattr(api, "cuLibraryLoadData", watched)
    monkeypatch.setattr(tune_images, "check_limits", refuse_two_warps)
    found = tuned(artifact, tmp_path, api, kernels=("linear_few",), buckets=(1,))
    assert loaded
    assert not [raw for raw in loaded if b"wavers" in raw]
    assert found.steps[0].sites[0].refused > 0


def some_spill(
    wanted: Sequence[Job], cache: ImageCache, workers: int, progress: Any = None, refused: dict[str, CompileError] | None = None
) -> Compiled:
    """As a compiler may that the shipped table was not chosen with."""
    made = dict(compile_images(wanted, cache, workers, progress, refused).images)
    for job in wanted:
        size = spilled(job.specialization)
        if size and job.key in made:
            made[job.key] = msgspec.structs.replace(made[job.key], spills=size)
    return Compiled(made, 0)


def spilled(specialization: Specialization) -> int:
    """Narrow tiles of `linear_few`, and `linear_silu` with the registers of the shipped table."""
    if specialization.kernel == "linear_few" and dict(specialization.constants)["BLOCK_N"] == 16:
        return 112
    return 8 if specialization.kernel == "linear_silu" and specialization.options.maxnreg == 168 else 0


def test_a_start_that_spills_is_measured_and_improved(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_images, "compile_images", some_spill)
    said: list[str] = []
    found = tuned(artifact, tmp_path, api, said.append, kernels=("linear_few", "linear_silu"), buckets=(2,))
    (step,) = found.steps
    assert step.us < step.before_us
    assert sum("the step as it is spills (linear_few 112, linear_silu 8 bytes a thread)" in line for line in said) == 1
    assert any("refused" in line and line.endswith("a thread spills 112 bytes") for line in said)
    table = decode_table((tmp_path / "t.json").read_bytes(), "t")
    assert {(site.kernel, bool(site.changed)) for site in step.sites} == {("linear_few", True), ("linear_silu", False)}
    monkeypatch.setattr(build_module, "compile_images", some_spill)
    monkeypatch.setattr(build_module, "find_toolchain", lambda parts: TOOLCHAIN)
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (2,), (16,), max_context=64, tuning=(table,))
    built = build_module.build(prepare(spec), tmp_path / "b.ouro", cache=ImageCache(tmp_path / "images"), workers=1)
    mine, shipped = built.notes
    assert "slower: entry 'linear_silu, 16 bits, 352 × 64, 2 rows' (8 bytes a thread). They are of --tuning." in mine
    assert "slower: linear_few (112 bytes a thread)" in shipped, "of the rows that were not tuned"


def faster_carved(api: FakeDriver, carveout: int) -> Callable[..., list[float]]:
    """Every launch is faster with that."""

    def measure(run: Callable[[], object], synchronize: Callable[[], object], hopeless: float) -> list[float]:
        before = len(api.executed)
        run()
        synchronize()
        return [(1000 + sum(node.kernel.carveout != carveout for node in api.executed[before:])) * 1e-6]

    return measure


def test_kernels_tuned_alone_keep_the_carveout_of_the_others(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_bench, "measure", faster_carved(api, 50))
    (step,) = tuned(artifact, tmp_path, api, buckets=(2,), kernels=("linear_rope",)).steps
    (site,) = step.sites
    assert (step.carveout_gained_us, site.changed) == (0, ())


def test_a_carveout_of_the_whole_step_is_found_and_built(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although what the step starts from spills: another carve-out is no other image."""
    monkeypatch.setattr(tune_bench, "measure", faster_carved(api, 50))
    monkeypatch.setattr(tune_images, "compile_images", some_spill)
    (step,) = tuned(artifact, tmp_path, api, buckets=(2,)).steps
    assert step.carveout_gained_us == pytest.approx(step.before_us - step.us)
    assert step.carveout_gained_us > 0
    assert {site.gained_us for site in step.sites} == {0.0}
    assert {site.changed for site in step.sites} == {(("carveout", 75, 50),)}
    table = decode_table((tmp_path / "t.json").read_bytes(), "t")
    monkeypatch.setattr(build_module, "compile_images", compile_images)
    monkeypatch.setattr(build_module, "find_toolchain", lambda parts: TOOLCHAIN)
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (2,), (16,), max_context=64, tuning=(table,))
    built = build_module.build(prepare(spec), tmp_path / "b.ouro", cache=ImageCache(tmp_path / "images"), workers=1)
    made = open_artifact(built.path)
    (target,) = made.manifest.targets
    index, columns = made.plans(target)
    of_two = [s for s in index.specializations if s.kernel in FORMS and dict(s.constants).get("ROWS") == 2]
    assert {s.options.carveout for s in of_two} == {50}
    plans = decode(index, columns)
    carved = {p.key for p in plans if {x.specialization.options.carveout for x in p.launches} == {50}}
    assert carved == {ProgramKey("recurrent", 2), ProgramKey("coda", 2)}
    assert {x.specialization.options.carveout for p in plans if p.key not in carved for x in p.launches} == {-1}


def faster_apart(api: FakeDriver) -> Callable[..., list[float]]:
    """Launches of `residual_norm` are faster with more shared memory, those of `linear_few` with all of a multiprocessor's."""

    def measure(run: Callable[[], object], synchronize: Callable[[], object], hopeless: float) -> list[float]:
        before = len(api.executed)
        run()
        synchronize()
        nodes = [(node.kernel, node.shared) for node in api.executed[before:]]
        norms = sum(kernel.name == "residual_norm" and shared < 2048 for kernel, shared in nodes)
        return [(1000 + norms + sum(kernel.name == "linear_few" and kernel.carveout != 100 for kernel, _ in nodes)) * 1e-6]

    return measure


def launched(table: TuningTable, bucket: int) -> dict[ProgramKey, set[tuple[str, str, int, int]]]:
    """(kernel, kind, carve-out, bytes) of what a sparse build with `table` launches in programs of `bucket` rows."""
    spec = BuildSpec(
        "preset:tiny",
        find_parts(["sm_90"]),
        (1, 2),
        (16,),
        max_context=64,
        tuning=(table,),
        sparse=SparseSpec(("dense", "capture", "consume"), key_retention=0.5),
    )
    (target,) = prepare(spec).targets
    found = {}
    for plan in decode(target.index, target.columns):
        if plan.key.bucket == bucket:
            launches = [(x.specialization.kernel, site_of(x), x.specialization.options) for x in plan.launches]
            found[plan.key] = {(k, "" if s is None else s.kind, o.carveout, o.shared) for k, s, o in launches}
    return found


def test_a_residency_of_the_whole_step_is_found_and_built(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_bench, "measure", faster_apart(api))
    monkeypatch.setattr(tune_residency, "TRIALS", 30)
    monkeypatch.setattr(tune_search, "ROUNDS", 0)
    said: list[str] = []
    found = tuned(artifact, tmp_path, api, said.append, buckets=(1, 2))
    assert api.live() == {}
    table = decode_table((tmp_path / "t.json").read_bytes(), "t")
    assert table.digest == found.digest
    asked = {rows: {(r.kernel, r.kind): r for r in table.residency if r.rows == rows} for rows in (1, 2)}
    assert asked[1].keys() == asked[2].keys()
    assert len(table.residency) == 2 * len(asked[1]), "what the first bucket found stays when the second is written"
    for step in found.steps:
        assert step.residency_gained_us > 0
        assert step.residency_gained_us + step.carveout_gained_us == pytest.approx(step.before_us - step.us)
        assert asked[step.bucket]["residual_norm", ""].shared >= 2048
        assert asked[step.bucket]["linear_few", "narrow"].carveout == 100
        wanted = {(r.kernel, r.kind, r.carveout, r.shared) for r in asked[step.bucket].values()}
        programs = launched(table, step.bucket)
        resident = {ProgramKey("recurrent", step.bucket), ProgramKey("coda", step.bucket)}
        assert set.union(*(programs[key] for key in resident)) == wanted
        assert all(shared == 0 for key in programs.keys() - resident for *_, shared in programs[key])
        assert ProgramKey("recurrent", step.bucket, "capture") in programs
    assert any(line.startswith("residency from as it is: ") for line in said)


def test_a_residency_of_a_table_to_start_from_stays_where_nothing_is_faster(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Carve-outs of kernels show nothing beside it: none is tried."""
    plans = decode(*artifact.plans(artifact.manifest.targets[0]))
    keys = {residency_key(x) for plan in plans if plan.key == ProgramKey("recurrent", 2) for x in plan.launches}
    mine = tuple(
        Residency(kernel=kernel, kind=kind, bits=16, rows=2, carveout=50, shared=2048) for kernel, kind in sorted(keys)
    )
    other = msgspec.structs.replace(mine[0], rows=16)
    start = TuningTable(name="start", arch="sm_90", source="a test", entries=(), residency=(*mine, other))
    kernel_choices: tuple[tuple[str, ...], ...] = ((), ("linear_rope",))
    for kernels in kernel_choices:
        monkeypatch.setattr(tune_bench, "measure", lambda run, synchronize, hopeless: [1e-3])
        said: list[str] = []
        (step,) = tuned(artifact, tmp_path, api, said.append, buckets=(2,), kernels=kernels, tables=(start,)).steps
        assert (step.carveout_gained_us, step.residency_gained_us) == (0, 0)
        assert decode_table((tmp_path / "t.json").read_bytes(), "t").residency == mine
        whole = not kernels
        assert sum(line.startswith("carve-outs: none tried, tables ask for a residency of 2 rows") for line in said) == whole
        assert sum(line.startswith("carve-outs: ") for line in said) == whole
        assert any(line.startswith("residency from ") for line in said) == whole


def test_prompt_chunks_have_no_residency(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_search, "ROUNDS", 0)
    said: list[str] = []
    tuned(artifact, tmp_path, api, said.append, buckets=(16,))
    prefill = next(at for at, line in enumerate(said) if line.startswith("prefill, 16 rows"))
    assert [at < prefill for at, line in enumerate(said) if line.startswith("residency from ")] == [True] * 3


def test_a_step_that_does_not_spill_says_nothing_of_it(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    said: list[str] = []
    tuned(artifact, tmp_path, api, said.append, kernels=("linear_rope",), buckets=(1,))
    assert not [line for line in said if line.startswith("the step as it is")]


def test_a_start_that_cannot_be_launched_is_refused(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_images, "compile_images", some_spill)
    monkeypatch.setattr(tune_images, "check_limits", refuse_eight_warps)
    with pytest.raises(BuildError, match="the step as it is must not be used: too many warps") as caught:
        tuned(artifact, tmp_path, api, kernels=("linear_few",), buckets=(1,))
    assert caught.value.hint == "Start from another table, or from none."
    assert api.live() == {}
    assert not (tmp_path / "t.json").exists()


def refuse_eight_warps(part: object, specialization: Specialization, image: Image) -> None:
    if specialization.options.num_warps == 8:
        raise CompileError("too many warps")


def refuse_two_warps(part: object, specialization: Specialization, image: Image) -> None:
    if specialization.options.num_warps == 2:
        raise CompileError("too few warps")


def test_every_family_and_what_is_settled_stays_so(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    found = tuned(artifact, tmp_path, api, buckets=(16,))
    assert [(s.family, s.context) for s in found.steps] == [("decode", 64), ("prefill", 0)]
    decode, prefill = ({site.kernel for site in step.sites} for step in found.steps)
    assert decode == {"attention_decode", "linear_few", "linear_rope", "linear_silu"}
    assert prefill == {"attention_prefill"}
    again = decode_table((tmp_path / "t.json").read_bytes(), "t")
    assert len({e.place for e in again.entries}) == len(again.entries)


def test_every_bucket_has_its_own_entries(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    tuned(artifact, tmp_path, api, kernels=("linear_few", "linear_rope", "linear_silu"), buckets=(1, 2))
    table = decode_table((tmp_path / "t.json").read_bytes(), "t")
    places = {rows: {(e.kernel, e.sizes) for e in table.entries if e.rows == rows} for rows in (1, 2)}
    assert places[1] == places[2]
    assert len(table.entries) == 2 * len(places[1])
    spec = BuildSpec("preset:tiny", find_parts(["sm_90"]), (1, 2), (16,), max_context=64, tuning=(table,))
    (target,) = prepare(spec).targets
    assert target.notes == ()
    assert {dict(s.constants)["ROWS"] == entry.rows for s, entry in target.chosen.items()} == {True}


def test_the_same_search_writes_the_same_table(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    (tmp_path / "b").mkdir()
    tuned(artifact, tmp_path, api, kernels=("linear_rope", "linear_silu"), buckets=(1,))
    tuned(artifact, tmp_path / "b", api, kernels=("linear_silu", "linear_rope"), buckets=(1,))
    assert (tmp_path / "t.json").read_bytes() == (tmp_path / "b" / "t.json").read_bytes()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_table_to_start_from(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    first = tuned(artifact, tmp_path, api, kernels=("linear_few",), buckets=(1,))
    table = decode_table((tmp_path / "t.json").read_bytes(), "t")
    said: list[str] = []
    again = tuned(artifact, tmp_path, api, said.append, kernels=("linear_few",), buckets=(1,), tables=(table,))
    assert again.steps[0].before_us == first.steps[0].us
    assert "the artifact was built with other tables (sm_90)" in said[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kernels": ("rms_norm",)}, "'rms_norm' has no configurations"),
        ({"buckets": (3,)}, "the artifact has no bucket 3"),
        ({"context": 65}, "^--context: a context of 65 is outside 1 … 64"),
        ({"kernels": ("linear_many",)}, "none of the chosen kernels is in the chosen buckets"),
    ],
)
def test_wrong_usage(artifact: Artifact, tmp_path: Path, api: FakeDriver, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        tuned(artifact, tmp_path, api, **changes)
    assert api.live() == {}
    assert not (tmp_path / "t.json").exists()


def test_an_artifact_of_another_version(tmp_path: Path, api: FakeDriver) -> None:
    made = open_artifact(make_artifact(tmp_path / "other.ouro", ("h200",), embedded=True))
    with pytest.raises(BuildError, match="launches other kernels than this version"):
        tuned(made, tmp_path, api, buckets=(1,))
    assert api.live() == {}


def test_a_table_that_cannot_be_written(artifact: Artifact, tmp_path: Path, api: FakeDriver) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match="cannot be written"):
        tune(artifact, tmp_path / "file" / "t.json", options(tmp_path, kernels=("linear_few",), buckets=(1,)), api=api)
    assert api.live() == {}


def test_the_command(
    artifact: Artifact, tmp_path: Path, api: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Mapping[str, Any] = {"tune": tune}
    monkeypatch.setattr(tune_module, "tune", lambda *given: real["tune"](*given, api=api))
    line = ["tune", str(artifact.path), "-o", str(tmp_path / "t.json"), "--kernel", "linear_few", "--bucket", "1"]
    line += ["--cache-dir", str(tmp_path / "images"), "--workers", "1"]
    assert exit_code(cli, [*line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "µs a step before" in err
    found = msgspec.json.decode(out, type=TuneResult)
    assert found.identity == artifact.identity
    Output(json=False).data(found, draw)
    out, _ = capsys.readouterr()
    for piece in ("linear_few", "64×176", "block_n 16 → ", "by residency", found.digest):
        assert piece in out
    assert exit_code(cli, [*line, "--tuning", str(tmp_path / "none.json")]) == 2
