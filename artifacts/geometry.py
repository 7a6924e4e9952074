"""What a build declares: shapes, contexts and depths that its programs serve."""

from __future__ import annotations

import msgspec

from ouro_build.artifacts.model import ModelConfig

SPARSE_MODES = ("dense", "capture", "consume", "mixed")
"""The modes of `recurrent`. Every build has the first."""


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Declared shapes. `buckets` are row counts of decode programs, `prefill_buckets` of prompt chunks, both ascending.

    `sparse_modes` are the modes of `recurrent`, in the order of SPARSE_MODES; `key_retention` is the share of its keys that a
    sparse row attends to. `key_capacity` keys and everything else that a row remembers fit into each of `reference_slots`.
    """

    buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    max_context: int
    max_requests: int
    block_size: int
    sparse_modes: tuple[str, ...] = ("dense",)
    key_retention: float = 1.0
    key_capacity: int = 0
    reference_slots: int = 0

    @property
    def references(self) -> bool:
        """Whether rows remember anything: without sparse modes they do not, and with all keys retained those are dense."""
        return len(self.sparse_modes) > 1 and self.key_retention < 1

    @property
    def padding_slot(self) -> int:
        """The reference slot that is none: it has no memory, and nothing is bound to it."""
        return self.reference_slots

    @property
    def table_width(self) -> int:
        """KV blocks that one request can have."""
        return -(-self.max_context // self.block_size)

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch of any program."""
        return max(self.buckets + self.prefill_buckets)

    @property
    def decode_slots(self) -> int:
        """State slots for rows that outlive a step. The first `max_requests` belong to the requests of the same index."""
        return max(self.max_requests, self.buckets[-1])

    @property
    def slots(self) -> int:
        """State slots in all: the rows that decode, then those of one prompt chunk."""
        return self.decode_slots + max(self.prefill_buckets, default=0)

    def block_bytes(self, model: ModelConfig) -> int:
        """Bytes of one KV block, all planes together."""
        return model.kv_bytes_per_token * self.block_size
