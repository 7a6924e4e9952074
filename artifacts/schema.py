"""JSON Schemas of every JSON file that an artifact or a command writes, made from the values that read them.

`python -m ouro_build.artifacts.schema FOLDER` writes them; those in `schemas/` are published with the package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from ouro_build.artifacts.bench_records import ServeBenchRecord, StartupBenchRecord
from ouro_build.artifacts.columns import PlanIndex
from ouro_build.artifacts.manifest import FORMAT, Manifest
from ouro_build.artifacts.oracle import Oracle
from ouro_build.artifacts.records import BenchRecord, CoverageRecord, ObservedRecord, SparseBenchRecord, StartupRecord
from ouro_build.artifacts.tuning import TuningTable

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PUBLISHED = Path(__file__).parent / "schemas"
_DESCRIBED: dict[str, tuple[str, Any]] = {
    "manifest": (f"manifest.json, format {FORMAT}", Manifest),
    "plan_index": (f"plans/PART.json, format {FORMAT}", PlanIndex),
    "oracle": (f"oracle.json, format {FORMAT}", Oracle),
    "coverage": ("coverage record, version 2", CoverageRecord),
    "startup": ("start-up record, version 1", StartupRecord),
    "observed": ("observed record, version 1", ObservedRecord),
    "bench": ("benchmark record, version 1", BenchRecord),
    "tuning": ("tuning table, version 1", TuningTable),
    "bench_sparse": ("benchmark of sparse decoding, version 1", SparseBenchRecord),
    "bench_startup": ("start-up benchmark record, version 1", StartupBenchRecord),
    "bench_serve": ("load benchmark record, version 1", ServeBenchRecord),
}
NAMES: tuple[str, ...] = tuple(_DESCRIBED)


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema called `name`, one of NAMES."""
    title, kind = _DESCRIBED[name]
    made = msgspec.json.schema(kind)
    return {"$schema": DIALECT, "title": title, **made}


def encode_schema(name: str) -> bytes:
    """The file it is published as."""
    return msgspec.json.format(msgspec.json.encode(schema(name), order="sorted"), indent=2) + b"\n"


def published(name: str) -> Path:
    """Where the package keeps it."""
    return PUBLISHED / f"{name}.json"


def write_schemas(folder: Path) -> None:
    """Write every schema into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.json").write_bytes(encode_schema(name))


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
