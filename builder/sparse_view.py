"""What an artifact does in its sparse modes, for people."""

from __future__ import annotations

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.references import slot_arithmetic


def sparse_facts(model: ModelConfig, geometry: Geometry) -> list[tuple[str, str]]:
    """(what, value): what sparse rows retain and where they keep it; nothing where every loop is dense."""
    if len(geometry.sparse_modes) == 1:
        return []
    share = f"{geometry.key_retention:g} of a row's keys"
    if not geometry.references:
        return [("retention", f"{share}: the sparse modes are dense")]
    slots = slot_arithmetic(model, geometry.key_capacity, geometry.reference_slots)
    return [("retention", f"{share}, room for {geometry.key_capacity}"), ("reference slots", slots)]
