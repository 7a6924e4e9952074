import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ouro_build.artifacts.checks import check_manifest
from ouro_build.artifacts.errors import ArtifactError, VersionError
from ouro_build.artifacts.manifest import Manifest, check_readable, decode_manifest, encode_manifest, identity, sealed
from ouro_build.artifacts.plan import LoadTimeValue, Pool
from ouro_build.artifacts.plan_checks import check_plans
from ouro_build.artifacts.reader import open_artifact
from tests.artifact_maker import BATCH, KV, encoded_plans, make_artifact

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return open_artifact(make_artifact(tmp_path_factory.mktemp("made") / "tiny.ouro")).manifest


def test_round_trip(manifest: Manifest) -> None:
    raw = encode_manifest(manifest)
    assert decode_manifest(raw) == manifest
    assert raw.isascii()
    assert re.search(rb"[ \n]", raw.replace(b"sm_", b"")) is None
    assert len(identity(raw)) == 64


def changed(manifest: Manifest, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The manifest after `change`, sealed again: only the change itself is wrong."""
    values = msgspec.json.decode(encode_manifest(manifest))
    change(values)
    values["seal"] = ""
    values["seal"] = identity(msgspec.json.encode(values, order="sorted"))
    return msgspec.json.encode(values, order="sorted")


def first_target(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["targets"][0]
    return found


STRICT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown field": (lambda v: v.update(extra=1), "unknown field `extra`"),
    "unknown inner field": (lambda v: v["model"].update(bias=True), r"`bias`.*\$\.model"),
    "missing field": (lambda v: v.pop("kv"), "missing required field `kv`"),
    "wrong type": (lambda v: v["model"].update(layers="2"), r"Expected `int`.*\$\.model\.layers"),
    "float for int": (lambda v: v["model"].update(layers=2.5), r"Expected `int`"),
    "world": (lambda v: v.update(world=2), r"\$\.world"),
    "unknown pool": (lambda v: first_target(v)["memory"]["pools"][0].update(pool=9), "Invalid enum value 9"),
    "kind": (lambda v: v.update(kind="zip"), "'ouro-artifact' expected"),
    "format": (lambda v: v.update(format="one"), "format is 'one'"),
}


@pytest.mark.parametrize("name", list(STRICT))
def test_strict(manifest: Manifest, name: str) -> None:
    change, message = STRICT[name]
    with pytest.raises(ArtifactError, match=message):
        decode_manifest(changed(manifest, change))


def test_versions(manifest: Manifest) -> None:
    def with_format(version: str) -> bytes:
        return changed(manifest, lambda values: values.update(format=version, extra=1))

    for version in ("2.0", "10.3", "0.9"):
        with pytest.raises(VersionError, match=f"format {version} is not known") as caught:
            decode_manifest(with_format(version))
        assert caught.value.exit_code == 3
    assert decode_manifest(changed(manifest, lambda v: v.update(format="1.7"))).format == "1.7"
    with pytest.raises(VersionError, match=r"format 1\.7 is not known"):
        decode_manifest(with_format("1.7"))
    damage = ArtifactError("unknown field")
    check_readable(manifest, damage, "plans/h200.json")
    with pytest.raises(VersionError, match=r"plans/h200\.json: format 1\.7 is not known"):
        check_readable(replace(manifest, format="1.7"), damage, "plans/h200.json")


def test_only_the_canonical_form(manifest: Manifest) -> None:
    raw = encode_manifest(manifest)
    for other in (
        msgspec.json.format(raw),
        raw + b" ",
        raw.replace(b'"world":1', b'"world":1,"world":1'),
        raw.replace(b'"kind":', b'"kin\\u0064":'),
    ):
        with pytest.raises(ArtifactError, match="canonical"):
            decode_manifest(other)
    for garbage in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, raw[:-1]):
        with pytest.raises(ArtifactError, match=r"manifest\.json: "):
            decode_manifest(garbage)


def test_the_seal(manifest: Manifest) -> None:
    assert sealed(manifest) == manifest
    with pytest.raises(ArtifactError, match="seal"):
        decode_manifest(encode_manifest(replace(manifest, toolchain=(("triton", "3.8.0"),))))


def _files(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda values: change(values["files"])


INCONSISTENT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "negative": (lambda v: v["weights"]["tensors"][3].update(offset=-256), r"weights\.tensors\[3\]\.offset: is -256"),
    "escape": (_files(lambda f: f[0].update(path="../out")), r"files\[0\]\.path: '\.\./out' is not a path inside"),
    "hidden escape": (_files(lambda f: f[0].update(path="a/../../b")), r"files\[0\]\.path"),
    "absolute": (_files(lambda f: f[0].update(path="/etc/passwd")), r"files\[0\]\.path"),
    "backslash": (_files(lambda f: f[0].update(path="a\\b")), r"files\[0\]\.path"),
    "empty path": (_files(lambda f: f[0].update(path="")), r"files\[0\]\.path"),
    "itself": (_files(lambda f: f.insert(0, dict(f[0], path="manifest.json"))), "files: |path: 'manifest.json'"),
    "unsorted": (_files(lambda f: f.reverse()), "files: not sorted"),
    "twice": (_files(lambda f: f.insert(0, f[0])), "files: not sorted by path, or a path is repeated"),
    "digest": (_files(lambda f: f[0].update(sha256="0" * 63)), r"files\[0\]: a digest"),
    "chunks": (_files(lambda f: f[0].update(chunks=["0" * 64])), r"files\[0\]\.chunks: 1 digests, 0 expected"),
    "large without chunks": (_files(lambda f: f[0].update(bytes=65 << 20)), r"files\[0\]\.chunks: 0 digests, 5 expected"),
    "embedded, not listed": (lambda v: v["weights"].update(embedded=True), r"files: weights\.safetensors is listed otherwise"),
    "overlap": (
        lambda v: v["weights"]["tensors"][2].update(offset=v["weights"]["tensors"][1]["offset"]),
        r"weights\.tensors: .* overlaps",
    ),
    "outside the pool": (lambda v: v["weights"].update(bytes=1000), r"weights\.bytes: tensors end at"),
    "tensor size": (lambda v: v["weights"]["tensors"][0].update(shape=[3]), r"weights\.tensors\[0\] .*12 expected"),
    "tensor type": (lambda v: v["weights"]["tensors"][0].update(dtype="int2"), "unknown type 'int2'"),
    "tensor alignment": (lambda v: v["weights"]["tensors"][1].update(offset=264), "no multiple of 16"),
    "tensor name": (lambda v: v["weights"]["tensors"][0].update(name="norm"), r"weights\.tensors: a name is repeated"),
    "no target": (lambda v: v.update(targets=[]), "targets: none"),
    "target twice": (lambda v: v["targets"].append(v["targets"][0]), "targets: .*two for one part"),
    "lost image": (
        lambda v: first_target(v)["images"][0].update(path="images/none.cubin"),
        r"targets\[0\]: images/none\.cubin not in files",
    ),
    "ptxas": (lambda v: first_target(v).update(ptxas="new"), r"targets\[0\]\.ptxas: 'new'"),
    "architecture": (lambda v: first_target(v)["part"].update(arch="gfx90a"), r"targets\[0\]\.part\.arch"),
    "shared": (lambda v: first_target(v)["images"][1].update(shared=1 << 20), r"targets\[0\]\.images\[1\]\.shared: 1048576"),
    "warps": (lambda v: first_target(v)["images"][1].update(num_warps=0), r"images\[1\]\.num_warps"),
    "small weights pool": (lambda v: first_target(v)["memory"]["pools"][0].update(bytes=9), r"weights pool has 9 bytes"),
    "kv pool fixed": (lambda v: first_target(v)["memory"]["pools"][0].update(pool=1), "is the KV pool"),
    "block size": (lambda v: first_target(v)["memory"].update(kv_block_bytes=9), r"memory\.kv_block_bytes: 9 bytes"),
    "no blocks": (lambda v: first_target(v)["memory"].update(kv_blocks=0), r"memory\.kv_blocks: is 0"),
    "over budget": (lambda v: first_target(v)["memory"].update(budget=1 << 30), "over the budget"),
    "kv digest": (lambda v: v.update(kv_digest="0" * 64), "kv_digest: is 000"),
    "planes": (lambda v: v["kv"]["planes"][0].reverse(), "kv_digest"),
    "float": (lambda v: v["model"].update(rope_theta="big"), r"model\.rope_theta: not a hexadecimal float"),
    "no layers": (lambda v: v["model"].update(layers=0), r"model\.layers: is 0"),
    "buckets": (lambda v: v["geometry"].update(buckets=[2, 1]), r"geometry\.buckets: not positive and ascending"),
    "bucket 0": (lambda v: v["geometry"].update(prefill_buckets=[0, 1]), r"geometry\.prefill_buckets: not positive"),
    "stop id": (lambda v: v.update(stop_ids=[512]), "stop_ids: not below 512"),
    "modes": (lambda v: v.update(modes=[]), "modes: empty"),
}


@pytest.mark.parametrize("name", list(INCONSISTENT))
def test_inconsistent(manifest: Manifest, name: str) -> None:
    change, message = INCONSISTENT[name]
    with pytest.raises(ArtifactError, match=message) as caught:
        check_manifest(decode_manifest(changed(manifest, change)))
    assert caught.value.where.startswith("manifest.json: ")


def with_axes(manifest: Manifest, *axes: str) -> Manifest:
    """The manifest with another order of the KV pool."""
    kv = replace(manifest.kv, axes=axes)
    return replace(manifest, kv=kv, kv_digest=kv.digest)


def test_the_kv_pool_has_planes_and_orders_that_kernels_know(manifest: Manifest) -> None:
    for planes in (((0, 1),) * 4, manifest.kv.planes[::-1]):
        kv = replace(manifest.kv, planes=planes)
        with pytest.raises(ArtifactError, match=r"kv\.planes: not loop \* layers \+ layer"):
            check_manifest(replace(manifest, kv=kv, kv_digest=kv.digest))
    inner = manifest.kv.axes[2:]
    for axes in (("plane", "block", *inner[::-1]), ("plane", *inner, "block"), ("block", "plane"), ()):
        with pytest.raises(ArtifactError, match=r"kv\.axes: not plane block .*, nor block plane"):
            check_manifest(with_axes(manifest, *axes))
    check_manifest(with_axes(manifest, "block", "plane", *inner))
    kv = replace(manifest.kv, planes=manifest.kv.planes[:3])
    with pytest.raises(ArtifactError, match=r"kv\.planes: not 4 loops of 2 layers"):
        check_manifest(replace(manifest, kv=kv, kv_digest=kv.digest))


BUFFERS = {
    "past its pool": (replace(BATCH, offset=512), "ends at byte 520, the pool io at 512"),
    "pool of no bytes": (replace(BATCH, pool=Pool.STATE), "the pool state at 0"),
    "unplaced": (replace(BATCH, offset=-1), "offset -1 is not"),
    "unaligned": (replace(BATCH, offset=8), "offset 8 is not a multiple of 16"),
    "type": (replace(BATCH, dtype="int3"), "unknown type 'int3'"),
    "negative dimension": (replace(BATCH, shape=(-2,)), "shape"),
    "two kv pools": (replace(KV, shape=(2, *KV.shape)), "the pool kv at"),
    "resized outside kv": (replace(BATCH, shape=(LoadTimeValue.KV_BLOCKS,)), "kv_blocks is no dimension of a buffer in io"),
    "stride as a dimension": (replace(KV, shape=(LoadTimeValue.KV_PLANE_STRIDE,)), "kv_plane_stride is no dimension"),
}


@pytest.mark.parametrize("name", list(BUFFERS))
def test_buffers_lie_in_their_pools(manifest: Manifest, name: str) -> None:
    buffer, message = BUFFERS[name]
    index, _ = encoded_plans()
    with pytest.raises(ArtifactError, match=message) as caught:
        check_plans(manifest, manifest.targets[0], replace(index, buffers=(*index.buffers, buffer)))
    assert caught.value.where == f"plans/h200.json: buffers[4] ({buffer.name})"


def test_plans_use_the_kv_pool_in_its_order(manifest: Manifest) -> None:
    index, _ = encoded_plans()
    target = manifest.targets[0]
    other = with_axes(manifest, "block", "plane", *manifest.kv.axes[2:])
    planes, blocks, *block = KV.shape
    swapped = replace(index, buffers=tuple(replace(b, shape=(blocks, planes, *block)) if b == KV else b for b in index.buffers))
    check_plans(other, target, swapped)
    for wrong, plans in ((manifest, swapped), (other, index)):
        with pytest.raises(ArtifactError, match="is not that of the manifest's kv") as caught:
            check_plans(wrong, target, plans)
        assert caught.value.where == "plans/h200.json: buffers[0] (kv)"


def test_plans_and_images_belong_together(manifest: Manifest) -> None:
    index, _ = encoded_plans()
    target = manifest.targets[0]
    check_plans(manifest, target, index)
    with pytest.raises(ArtifactError, match="2 specialisations, the manifest has 1 images"):
        check_plans(manifest, replace(target, images=target.images[:1]), index)
    with pytest.raises(ArtifactError, match=r"gather takes 7 parameters, image .* 5"):
        check_plans(manifest, replace(target, images=target.images[::-1]), index)
    first, *others = index.specializations
    for carveout in (-2, 101):
        wrong = replace(first, options=replace(first.options, carveout=carveout))
        with pytest.raises(ArtifactError, match=f"the carve-out is {carveout}, a percentage or -1 expected"):
            check_plans(manifest, target, replace(index, specializations=(wrong, *others)))
    for shared in (-1, target.part.shared + 1):
        wrong = replace(first, options=replace(first.options, shared=shared))
        with pytest.raises(
            ArtifactError, match=f"a block's shared memory is {shared} bytes, 0 … {target.part.shared} expected"
        ):
            check_plans(manifest, target, replace(index, specializations=(wrong, *others)))
    with pytest.raises(ArtifactError, match="two plans have one key"):
        check_plans(manifest, target, replace(index, plans=index.plans * 2))
    entry = index.plans[0]
    with pytest.raises(ArtifactError, match="a mode that the manifest does not list"):
        check_plans(manifest, target, replace(index, plans=(replace(entry, key=replace(entry.key, mode="capture")),)))


def test_a_wrong_manifest_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="stop_ids"):
        make_artifact(tmp_path / "bad.ouro", stop_ids=(10**6,))
    assert list(tmp_path.iterdir()) == []
