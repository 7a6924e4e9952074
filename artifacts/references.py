"""What reference slots take: the memory in which sparse rows keep what their source loop retained."""

from __future__ import annotations

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig


def slot_bytes(model: ModelConfig, key_capacity: int) -> int:
    """Bytes of one reference slot that has room for `key_capacity` keys a layer and query head.

    A head has int32 key positions, float32 attention output and contribution, float32 mass; a layer an int32 generation and
    an int32 count.
    """
    head = 4 * key_capacity + 8 * model.head_dim + 4
    return model.layers * (model.heads * head + 8)


def slot_arithmetic(model: ModelConfig, key_capacity: int, slots: int) -> str:
    """How the bytes of `slots` such slots come about, for people."""
    layers, heads, one = model.layers, model.heads, slot_bytes(model, key_capacity)
    return (
        f"{slots} x ({layers} layers x {heads} heads x (4 x {key_capacity} keys + 8 x {model.head_dim}) + "
        f"{layers * (4 * heads + 8)} of metadata) = {slots} x {one:,} = {slots * one:,} bytes"
    )


def slots_part(model: ModelConfig, geometry: Geometry) -> str:
    """Reference slots as a part of the memory that is needed, for people; empty where there are none."""
    if not geometry.references:
        return ""
    return f", reference slots ({slot_arithmetic(model, geometry.key_capacity, geometry.reference_slots)})"
