"""What a caller decides about how a worker is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ouro_build.artifacts.records import CoverageRecord

if TYPE_CHECKING:
    from ouro_build.runtime.given_memory import GivenMemory

Verification = Literal["full", "fast"]
"""`full`: every byte against its digest. `fast`: all sizes, and the digests of all but the weights."""


@dataclass(frozen=True)
class Loading:
    """How pools are opened.

    `weights` says where an artifact without weights takes them from. `coverage` is a record of the work that is to come:
    graphs that were replayed most are restored first. `given` are pools that the process owns already.
    """

    weights: str | None = None
    verify: Verification = "full"
    coverage: CoverageRecord | None = None
    given: GivenMemory | None = None

    @property
    def check_weights(self) -> bool:
        """Whether weights are compared with their digests."""
        return self.verify == "full"
