"""Prompts from real text: the held-out sequences of the small model that comes with the package."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ouro_build.artifacts.presets import SHIPPED

HELD_OUT = SHIPPED["tiny-trained"] / "heldout.json"


class SampleText:
    """Token ids of the text, below `vocab_size`: for a vocabulary smaller than the text's, by their remainder."""

    def __init__(self, vocab_size: int) -> None:
        sequences: list[dict[str, Any]] = msgspec.json.decode(HELD_OUT.read_bytes())["sequences"]
        self._ids: NDArray[np.int64] = np.concatenate([s["ids"] for s in sequences]) % vocab_size

    def prompt(self, start: int, length: int) -> list[int]:
        """`length` ids from place `start` on; after the text's end it begins again."""
        taken: list[int] = self._ids.take(np.arange(start, start + length), mode="wrap").tolist()
        return taken

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """`count` prompts from places that `seed` chooses."""
        starts = np.random.default_rng(seed).integers(0, len(self._ids), count).tolist()
        return [self.prompt(start, length) for start in starts]
