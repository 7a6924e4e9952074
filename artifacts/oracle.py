"""The oracle: one prompt and what the reference made of it, carried in the artifact so that any worker can check itself.

It is made by float32 arithmetic on the artifact's own weights, whatever the model's dtype; a worker that computes in bfloat16
is held to it where the choice is clear.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ouro_build.artifacts.errors import ArtifactError
from ouro_build.artifacts.manifest import ORACLE

MARGIN_UNIT = 64
"""Margins are stored in 1/64 of a logit, rounded down: far coarser than what a CPU's order of float32 sums changes."""
MARGIN_LIMIT = 1 << 20


class Oracle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`greedy_ids[i]` follows the prompt and the ids before it; `margins[i]` is how far it led the second choice."""

    prompt_ids: tuple[int, ...]
    greedy_ids: tuple[int, ...]
    margins: tuple[int, ...]

    def disagreements(self, ids: Sequence[int], margin: float) -> tuple[int, ...]:
        """Steps where `ids`, chosen with the recorded ids fed, differ though the recorded margin is over `margin` logits."""
        units = margin * MARGIN_UNIT
        found = [i for i, (a, b, m) in enumerate(zip(ids, self.greedy_ids, self.margins, strict=False)) if a != b and m > units]
        return (*found, *range(len(ids), len(self.greedy_ids)))


def margin_units(margin: float) -> int:
    """A top-2 margin in logits as a stored integer, rounded down."""
    return int(min(margin * MARGIN_UNIT, MARGIN_LIMIT))


def encode_oracle(oracle: Oracle) -> bytes:
    """Canonical bytes."""
    return msgspec.json.encode(oracle, order="sorted")


def decode_oracle(raw: bytes, vocab_size: int, where: str = ORACLE) -> Oracle:
    """Read an oracle strictly. Raises ArtifactError."""
    try:
        oracle = msgspec.json.decode(raw, type=Oracle)
    except msgspec.MsgspecError as error:
        raise ArtifactError(str(error), where=where) from error
    if encode_oracle(oracle) != raw:
        raise ArtifactError("not in canonical form", where=where)
    ids = oracle.prompt_ids + oracle.greedy_ids
    if not oracle.prompt_ids or not oracle.greedy_ids or any(not 0 <= i < vocab_size for i in ids):
        raise ArtifactError(f"the prompt or the answer is empty, or an id is not in 0 … {vocab_size - 1}", where=where)
    if len(oracle.margins) != len(oracle.greedy_ids) or any(m < 0 for m in oracle.margins):
        raise ArtifactError(f"{len(oracle.margins)} margins for {len(oracle.greedy_ids)} ids, or one is negative", where=where)
    return oracle
