from pathlib import Path

import jsonschema
import msgspec
import pytest

from ouro_build.artifacts.manifest import Manifest, encode_manifest
from ouro_build.artifacts.oracle import encode_oracle
from ouro_build.artifacts.reader import open_artifact
from ouro_build.artifacts.records import encode_record
from ouro_build.artifacts.schema import NAMES, encode_schema, published, schema, write_schemas
from ouro_build.artifacts.tuning import encode_table
from ouro_build.artifacts.writer import encode_plan_index
from tests.artifact_maker import ORACLE, encoded_plans, make_artifact
from tests.unit.artifacts.test_records import BENCH, BENCH_SERVE, BENCH_STARTUP, COVERAGE, OBSERVED, SPARSE, STARTUP
from tests.unit.artifacts.test_tuning import TABLE


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    manifest: Manifest = open_artifact(make_artifact(tmp_path_factory.mktemp("made") / "tiny.ouro", embedded=True)).manifest
    return {
        "manifest": encode_manifest(manifest),
        "plan_index": encode_plan_index(encoded_plans()[0]),
        "oracle": encode_oracle(ORACLE),
        "coverage": encode_record(COVERAGE),
        "startup": encode_record(STARTUP),
        "observed": encode_record(OBSERVED),
        "bench": encode_record(BENCH),
        "tuning": encode_table(TABLE),
        "bench_sparse": encode_record(SPARSE),
        "bench_startup": encode_record(BENCH_STARTUP),
        "bench_serve": encode_record(BENCH_SERVE),
    }


@pytest.mark.parametrize("name", NAMES)
def test_published_schema_is_current(name: str) -> None:
    assert published(name).read_bytes() == encode_schema(name), "python -m ouro_build.artifacts.schema artifacts/schemas"


def test_all_are_published(tmp_path: Path) -> None:
    write_schemas(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in published("oracle").parent.glob("*.json")}


@pytest.mark.parametrize("name", NAMES)
def test_real_files_are_valid_and_damaged_ones_are_not(name: str, samples: dict[str, bytes]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    validator = jsonschema.Draft202012Validator(schema(name))
    value = msgspec.json.decode(samples[name])
    validator.validate(value)
    assert not validator.is_valid({**value, "unknown": 1})
    required = schema(name)["$defs"][schema(name)["$ref"].rsplit("/", 1)[1]]["required"]
    for field in required:
        assert not validator.is_valid({k: v for k, v in value.items() if k != field}), field
